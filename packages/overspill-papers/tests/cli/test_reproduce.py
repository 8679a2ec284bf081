"""`overspill reproduce` by its contract: keys, exit codes, and no traceback; on claims that cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill_papers import papers
from overspill_papers.papers import Claim, Lab
from overspill_papers.papers.figures import PaperFigure

KEYS = {
    "where", "what", "section", "quote", "unit", "bound", "paper", "ours", "ratio", "agrees", "fitted", "aside", "note",
    "error", "certain", "repeats", "counts", "without", "agrees_anyway", "assumed", "scaled",
}  # fmt: skip


def without_offloading(lab: Lab) -> float:
    return (5.0 if lab.replaced("vdnn-all:m") == "vdnn-all:m" else 50.0) * lab.scale


@pytest.fixture
def two_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    made = (
        Claim("vdnn", "Fig. 1", "one", "said so", "I", 28.0, "GB", lambda _: 28.0),
        Claim("vdnn", "Fig. 2", "two", "said so", "II", 2.0, "x", lambda _: 3.0, "[half] more by an experiment", ">"),
        Claim("vdnn", "Fig. 3", "three", "said so", "III", 5.0, "ms", lambda _: 5.0, fitted="the clock is set by it."),
        Claim("vdnn", "Fig. 3", "four", "said so", "III", 5.0, "ms", lambda _: 5.0, aside="the other way."),
        Claim("vdnn", "Fig. 4", "five", "said so", "IV", 5.0, "ms", lambda _: 4.0, certain="it is less.", bound="<"),
        Claim("vdnn", "Fig. 4", "six", "said so", "IV", 5.0, "ms", lambda _: 5.0, repeats="it is five's."),
        Claim("vdnn", "Fig. 4", "seven", "said so", "IV", 5.0, "ms", lambda _: 5.0, bound=">"),
        Claim("vdnn", "Fig. 4", "eight", "said so", "IV", 5.0, "ms", without_offloading, assumed="a clock"),
    )
    drawn = (PaperFigure("Fig. 3", "bars", "layer", "ms", lambda _: {"forward": {"a": 1.0, "b": 2.0}}),)
    monkeypatch.setattr("overspill_papers.papers.vdnn.CLAIMS", made)
    monkeypatch.setattr("overspill_papers.papers.figures.vdnn.FIGURES", drawn)


@pytest.mark.usefixtures("two_claims")
def test_the_answer_has_a_row_a_claim(overspill: Overspill) -> None:
    done = overspill("reproduce vdnn --json")
    assert done.code == 0
    answer = done.answer
    assert answer["paper"] == "vdnn"
    assert answer["simulated"] is True
    assert [set(row) for row in answer["rows"]] == [KEYS] * 8
    assert [row["ratio"] for row in answer["rows"]] == [1.0, 1.5, 1.0, 1.0, 0.8, 1.0, 1.0, 1.0]
    assert [row["note"] for row in answer["rows"][:3]] == [None, "[half] more by an experiment", None]
    assert answer["counts"] == {
        "figures": 1, "agreeing": 1, "agreeing_anyway": 1, "limits": 0, "limits_kept": 0, "limits_kept_anyway": 1,
        "fitted": 1, "aside": 1, "certain": 2, "repeats": 1,
    }  # fmt: skip
    assert (answer["rows"][-1]["without"], answer["rows"][-1]["agrees_anyway"]) == (50.0, False)
    assert answer["rows"][-1]["scaled"] == {"a third": pytest.approx(5 / 3), "3 times": 15.0}


@pytest.mark.usefixtures("two_claims")
def test_the_table_says_that_it_is_simulated_and_what_each_figure_is(overspill: Overspill) -> None:
    done = overspill("reproduce vdnn")
    assert done.code == 0
    assert "simulated" in done.out
    text = " ".join(done.out.split())
    assert "1 of 1 figures within 15 %; rows that do not count: 1 figure and 1 limit that would hold with" in text
    assert "nothing offloaded too, 1 by which a constant was set, 1 other readings, 2 that cannot fail, 1 that" in text
    assert "Does not count: the clock is set by it." in done.out
    assert "Does not count, for it cannot fail: ours is the limit itself." in text
    assert "Rests on what is assumed, a clock: 1.67 at a third and 15 at 3 times of it." in text
    assert "Another reading, not counted: the other way." in done.out
    assert "28 GB" in done.out
    assert "> 2 x" in done.out
    assert "(1) [half] more by an experiment" in done.out


@pytest.mark.usefixtures("two_claims")
def test_one_table_alone(overspill: Overspill) -> None:
    done = overspill("reproduce", "micro16", "--table", "fig 2", "--json")
    assert [row["where"] for row in done.answer["rows"]] == ["Fig. 2"]


@pytest.mark.usefixtures("two_claims")
def test_a_page_has_every_row_and_figure_and_needs_nothing_else(overspill: Overspill, tmp_path: Path) -> None:
    page = tmp_path / "vdnn.html"
    assert overspill("reproduce", "vdnn", "--report", str(page)).code == 0
    text = page.read_text(encoding="utf-8")
    for said in ("Fig. 1", "Fig. 2", "28 GB", "\\u003e 2 x", '"fitted"', '"aside"', "Fig. 3, ours: bars", "simulated"):
        assert said in text
    assert "src=" not in text


@pytest.mark.usefixtures("two_claims")
def test_a_page_is_html_and_goes_where_it_can(overspill: Overspill, tmp_path: Path) -> None:
    assert "must end in .html" in overspill("reproduce", "vdnn", "--report", "figure.png").err
    done = overspill("reproduce", "vdnn", "--report", str(tmp_path / "none" / "page.html"))
    assert done.code == 2
    assert "cannot write" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("reproduce", "resnet"), "Papers: vdnn, dymem, window, placement"),
        (("reproduce", "vdnn", "--table", "Fig. 99"), "Tables and figures: Fig. 1"),
        (("reproduce",), "PAPER"),
    ],
)
def test_an_unknown_paper_or_table_is_the_users_mistake(
    overspill: Overspill, words: tuple[str, ...], told: str
) -> None:
    done = overspill(*words)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err


def test_the_help_names_every_paper(overspill: Overspill) -> None:
    done = overspill("reproduce --help")
    assert all(paper.name in done.out for paper in papers.PAPERS)
