"""A paper's figures beside ours as one page of HTML, by plotly: the rows of each figure, then what the paper draws, as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from overspill.core.errors import RequestError
from overspill.papers import Paper, Result
from overspill.papers.figures import Curve, Figure

from .plot import COLOURS, check_plot
from .reproduce import short_figure

PAPERS_COLOUR, OURS_COLOUR = COLOURS[1], COLOURS[0]
HEIGHT_PIXELS, AROUND_ROWS_PIXELS, ROW_PIXELS = 420, 190, 46
NAME_LETTERS = 48
"""Longer names of rows are broken into lines."""
_STYLE = "body{font-family:sans-serif;margin:2em auto;max-width:72em;padding:0 1em} p{color:#444}"


def check_page(path: Path) -> None:
    """Raise RequestError where `path` can not become a page, before work is done for it."""
    if path.suffix.lower() != ".html":
        raise RequestError(f"cannot plot to {path}: the file must end in .html")
    check_plot(path)


def draw_page(
    paper: Paper, found: Sequence[Result], drawn: Sequence[tuple[Figure, Mapping[str, Curve]]], path: Path
) -> None:
    """Write the page of `found` and `drawn` to `path`; it needs nothing else. Raises RequestError when it cannot."""
    charts = [_rows_chart(where, rows) for where, rows in _by_place(found).items()]
    charts += [_curves_chart(figure, curves) for figure, curves in drawn]
    body = "\n".join(chart.to_html(full_html=False, include_plotlyjs=not i) for i, chart in enumerate(charts))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(paper.title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(paper.title)}</h1>"
        f"<p>Ours are simulated, on {escape(paper.machine)}; nothing was measured. First come the figures that the paper's"
        " text gives, each beside ours as shares of the paper's, for units differ. Then what the paper draws, as ours alone:"
        f" its own bars and curves can only be read off its plots.</p>\n{body}</body></html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}; name another file") from None


def _by_place(found: Sequence[Result]) -> dict[str, list[Result]]:
    places: dict[str, list[Result]] = {}
    for result in found:
        places.setdefault(result.claim.where, []).append(result)
    return places


def _rows_chart(where: str, rows: Sequence[Result]) -> Any:
    """Pairs of bars, all as shares of the paper's figures, for their units differ; the figures stand beside them."""
    from plotly import graph_objects  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional library

    names = [_name(result) for result in rows][::-1]
    figure = graph_objects.Figure()
    for label, colour, values, texts in (
        ("ours", OURS_COLOUR, [r.ratio or 0.0 for r in rows], [_said(r.ours, r) for r in rows]),
        ("paper", PAPERS_COLOUR, [1.0] * len(rows), [f"{_bound(r)}{_said(r.claim.value, r)}" for r in rows]),
    ):
        figure.add_bar(
            y=names, x=values[::-1], text=texts[::-1], name=label, orientation="h", marker_color=colour,
            hovertemplate="%{y}: %{text}<extra></extra>", textfont_size=12, textangle=0, constraintext="none",
        )  # fmt: skip
    most = max([1.0, *(result.ratio or 0.0 for result in rows)])
    figure.update_xaxes(title_text="share of the paper's figure", range=(0, 1.15 * min(most, 3.0)))
    figure.update_yaxes(automargin=True)
    # Above the bars, in their order from above.
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "reversed"})
    return _laid_out(figure, where, AROUND_ROWS_PIXELS + ROW_PIXELS * len(rows))


def _curves_chart(figure: Figure, curves: Mapping[str, Curve]) -> Any:
    from plotly import graph_objects  # noqa: PLC0415 - an optional library

    chart = graph_objects.Figure()
    for (name, curve), colour in zip(curves.items(), (COLOURS * (1 + len(curves) // len(COLOURS))), strict=False):
        along, values = list(curve), list(curve.values())
        if figure.lines:
            chart.add_scatter(x=along, y=values, name=name, mode="lines+markers", line_color=colour)
        else:
            chart.add_bar(x=along, y=values, name=name, marker_color=colour)
    chart.update_xaxes(title_text=figure.x_axis, automargin=True)
    chart.update_yaxes(title_text=figure.y_axis)
    chart.update_layout(barmode="stack" if figure.stacked else "group")
    return _laid_out(chart, f"{figure.where}, ours: {figure.title}", HEIGHT_PIXELS)


def _laid_out(chart: Any, title: str, height: int) -> Any:
    return chart.update_layout(title=title, template="plotly_white", height=height)


def _name(result: Result) -> str:
    uncounted = "fitted" if result.claim.fitted else "aside" if result.claim.aside else ""
    name = f"{result.claim.what} ({uncounted})" if uncounted else result.claim.what
    return "<br>".join(map(escape, wrap(name, NAME_LETTERS)))


def _bound(result: Result) -> str:
    return "" if result.claim.bound == "=" else f"{result.claim.bound} "


def _said(value: float | None, result: Result) -> str:
    return "none" if value is None else f"{short_figure(value)} {result.claim.unit}"
