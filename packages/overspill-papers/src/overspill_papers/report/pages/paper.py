"""A paper's figures and ours as a page: the rows of each figure, then the paper's plots with our figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overspill.report.page import Axis, Column, Lines, Page, Section, Table, Unit, Verdict
from overspill.report.page import Curve as Line
from overspill_papers.papers import Counts, Paper, Result
from overspill_papers.papers.figures import Curve, PaperFigure
from overspill_papers.report.reproduce import agreement, counted, remark, settled, short_figure

COLUMNS = (Column("what"), Column("paper"), Column("ours"), Column("ratio", Unit.RATIO), Column("agrees"),
    Column("note"))  # fmt: skip


def paper_page(paper: Paper, found: Sequence[Result], drawn: Sequence[tuple[PaperFigure, Mapping[str, Curve]]]) -> Page:
    """Return the page of `found` and `drawn`."""
    sections: list[Section] = [_rows(where, rows) for where, rows in _by_place(found).items()]
    sections += [_drawn(figure, curves) for figure, curves in drawn]
    notes = (
        f"Ours are simulated, on {paper.machine}; nothing was measured.",
        (
            "First come the figures that the paper's text gives. Then what the paper draws, as ours alone: its own "
            "bars and curves can only be read off its plots."
        ),
    )
    return Page(paper.title, Verdict(counted(Counts.of(found), paper.without), good=None), tuple(sections), notes)


def _by_place(found: Sequence[Result]) -> dict[str, list[Result]]:
    places: dict[str, list[Result]] = {}
    for result in found:
        places.setdefault(result.claim.where, []).append(result)
    return places


def _rows(where: str, rows: Sequence[Result]) -> Table:
    return Table(where, COLUMNS, tuple((r.claim.what, *_said(r), _ratio(r), agreement(r), remark(r)) for r in rows))


def _ratio(result: Result) -> float | None:
    return None if result.ratio is None else settled(result.ratio)


def _said(result: Result) -> tuple[str, str]:
    """Return the paper's figure, and ours."""
    claim = result.claim
    bound = "" if claim.bound == "=" else f"{claim.bound} "
    ours = "none" if result.ours is None else f"{short_figure(result.ours)} {claim.unit}"
    return f"{bound}{short_figure(claim.value)} {claim.unit}", ours


def _drawn(figure: PaperFigure, curves: Mapping[str, Curve]) -> Lines | Table:
    """Return a chart of curves, or of bars by name.

    It has lines if the axis has numbers, otherwise a row for each name, with its bars.
    """
    title = f"{figure.where}, ours: {figure.title}"
    numbers = {name: {x: y for x, y in curve.items() if isinstance(x, (int, float))} for name, curve in curves.items()}
    if figure.lines and all(len(numbers[name]) == len(curve) for name, curve in curves.items()):
        lines = tuple(Line(name, [*points], [*points.values()]) for name, points in numbers.items())
        return Lines(title, Axis(figure.x_axis), Axis(figure.y_axis), lines)
    along = dict.fromkeys(str(x) for curve in curves.values() for x in curve)
    named = {name: {str(x): settled(float(y)) for x, y in curve.items()} for name, curve in curves.items()}
    columns = (Column(figure.x_axis), *(Column(name, Unit.NUMBER, bar=True) for name in curves))
    rows = tuple((x, *(named[name].get(x) for name in curves)) for x in along)
    return Table(title, columns, rows, figure.y_axis)
