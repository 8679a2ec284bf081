"""What docs/background/papers.md says of the papers' figures is what comes out today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overspill_papers.papers import PAPERS, Counts, Lab, Paper, claims_of, results

PAGE = Path(__file__).parents[4] / "docs" / "background" / "papers.md"


@pytest.mark.long
@pytest.mark.parametrize("paper", PAPERS, ids=[paper.name for paper in PAPERS])
def test_the_counts_on_the_page_are_those_of_today(paper: Paper) -> None:
    row = next(
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"`overspill reproduce {paper.name}`" in line
    )
    counts = Counts.of(list(results(claims_of(paper), Lab(), paper.instead)))
    said = [
        f"{counts.agreeing} of {counts.figures}",
        str(counts.agreeing_anyway),
        f"{counts.limits_kept} of {counts.limits}",
        str(counts.limits_kept_anyway),
    ]
    assert re.findall(r"(?<=\| )\d+(?: of \d+)?(?= \|)", row) == said
