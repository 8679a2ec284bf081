"""What README.md says of the papers' figures is what comes out today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overspill_papers.papers import PAPERS, Counts, Lab, Paper, claims_of, results

README = Path(__file__).parents[4] / "README.md"


@pytest.mark.long
@pytest.mark.parametrize("paper", PAPERS, ids=[paper.name for paper in PAPERS])
def test_the_counts_of_the_readme_are_those_of_today(paper: Paper) -> None:
    said = re.search(rf"\b{paper.name}\s+(\d+)\s+of\s+(\d+)\s+\((\d+)\b", README.read_text(encoding="utf-8"))
    assert said is not None
    counts = Counts.of(list(results(claims_of(paper), Lab(), paper.instead)))
    assert (counts.agreeing, counts.figures, counts.agreeing_anyway) == tuple(map(int, said.groups()))
