"""The page of a paper's figures has the words and the remarks of the terminal's table."""

from __future__ import annotations

import pytest
from tests.report.test_plan import shown

from overspill.report.page import Table
from overspill_papers.papers import PAPERS, Claim, Result
from overspill_papers.papers.figures import PaperFigure
from overspill_papers.report.pages.paper import paper_page
from overspill_papers.report.reproduce import reproduce_report, short_figure

FOUND = (
    Result(Claim("vdnn", "Fig. 1", "one", "", "I", 5.0, "ms", lambda _: 5.0, fitted="the clock is set by it."), 5.0),
    Result(Claim("vdnn", "Fig. 1", "two", "", "I", 5.0, "ms", lambda _: 5.0, "as is", aside="by time"), 9.0),
    Result(Claim("vdnn", "Fig. 1", "three", "", "I", 4.0, "%", lambda _: 0.0, "why it is off"), -3.22e-13),
    Result(Claim("vdnn", "Fig. 1", "four", "", "I", 4.0, "GB", lambda _: 4.0), 4.0),
)


def test_rows_have_the_words_of_the_terminal_and_say_why() -> None:
    page = paper_page(PAPERS[0], FOUND, ())
    (table,) = page.sections
    assert isinstance(table, Table)
    assert [row[-2] for row in table.rows] == ["fitted", "aside", "no", "yes"]
    terminal = shown(reproduce_report(PAPERS[0], FOUND))
    for *_, note in table.rows[:3]:
        assert f") {note}" in terminal
    assert [row[0] for row in table.rows] == ["one", "two", "three", "four"]
    assert (table.rows[2][2], table.rows[2][3]) == ("0.0 %", 0.0)


@pytest.mark.parametrize(
    ("value", "text"), [(-3.22e-13, "0.0"), (0.0, "0.0"), (0.00123, "0.00123"), (-1.5, "-1.5"), (123.4, "123")]
)
def test_what_rounding_leaves_of_a_difference_is_nothing(value: float, text: str) -> None:
    assert short_figure(value) == text


def test_bars_are_without_it_too() -> None:
    drawn = PaperFigure("Fig. 2", "saved", "network", "%", lambda _: {})
    table = paper_page(PAPERS[0], (), [(drawn, {"ours": {"alexnet": -3e-13, "vgg": 2.5}})]).sections[0]
    assert isinstance(table, Table)
    assert table.rows == (("alexnet", 0.0), ("vgg", 2.5))
