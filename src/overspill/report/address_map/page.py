"""An address map as a page of HTML, by plotly: what a rectangle is appears when it is pointed at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Trace
from overspill.core.units import format_bytes

from .rectangles import (
    BOUND_COLOUR,
    LIVE_COLOUR,
    LIVE_HEIGHT,
    MAP_HEIGHT,
    SIZE_AXIS,
    TIME_AXIS,
    AddressMap,
    address_axis,
    lines,
    name_of,
    powers_of_2,
    size_range,
)

COLOURSCALE = "Viridis"
SHADES = 12
MOST_HOVERED = 5000
"""So many rectangles a browser can draw one by one; the smaller ones share a shape each shade."""
MOST_DRAWN = 100_000
"""Smaller ones than the so many largest are left out; they would only make the page slow."""


def draw_html(trace: Trace, maps: Sequence[AddressMap], path: Path, title: str, capacity_bytes: int | None) -> None:
    """Draw `maps` of `trace` below one another into `path`, which needs nothing else."""
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional library

    shares = [share for _ in maps for share in (MAP_HEIGHT, LIVE_HEIGHT)]
    figure = make_subplots(rows=len(shares), cols=1, shared_xaxes=True, row_heights=shares, vertical_spacing=0.04)
    sizes = size_range(maps)
    colours = [math.log2(size) for size in sizes]
    for index, shown in enumerate(maps):
        row, top = 2 * index + 1, shown.top(capacity_bytes)
        largest = np.argsort(-(shown.end - shown.start) * shown.nbytes, kind="stable")
        _add_shapes(figure, shown, largest[MOST_HOVERED:MOST_DRAWN], colours, row)
        _add_bars(figure, trace, shown, largest[:MOST_HOVERED], row)
        for at, text, colour, style in lines(shown, capacity_bytes):
            line = {"color": colour, "dash": style, "width": 1.2}
            if at <= top:
                place = "top left" if colour == BOUND_COLOUR else "top right"
                figure.add_hline(at, line=line, annotation_text=text, annotation_position=place, row=row, col=1)
        figure.add_scatter(
            x=shown.times, y=shown.live, mode="lines", fill="tozeroy", line={"shape": "hv", "color": LIVE_COLOUR, "width": 1},
            hovertemplate=f"from %{{x}}: %{{y:.2f}} {shown.unit} live<extra></extra>", row=row + 1, col=1,
        )  # fmt: skip
        figure.update_xaxes(range=shown.time_range, row=row, col=1)
        figure.update_yaxes(title=address_axis(shown, maps), range=(0, top), row=row, col=1)
        figure.update_yaxes(title=f"live ({shown.unit})", range=(0, top), row=row + 1, col=1)
    figure.update_xaxes(title=TIME_AXIS, row=len(shares), col=1)
    if any(len(shown) > MOST_DRAWN for shown in maps):
        title += f" (the {MOST_DRAWN} largest are shown)"
    ticks = powers_of_2(*sizes)
    figure.update_layout(
        title=escape(title),
        template="plotly_white",
        barmode="overlay",
        showlegend=False,
        hovermode="closest",
        height=max(700, 500 * len(maps)),
        coloraxis={
            "colorscale": COLOURSCALE,
            "cmin": colours[0],
            "cmax": colours[1],
            "colorbar": {
                "title": SIZE_AXIS,
                "tickvals": [math.log2(size) for size in ticks],
                "ticktext": [format_bytes(size) for size in ticks],
            },
        },
    )
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _add_bars(figure: Any, trace: Trace, shown: AddressMap, chosen: NDArray[np.int64], row: int) -> None:
    """The chosen rectangles, each with what it is."""
    places = zip(shown.block[chosen].tolist(), shown.offset[chosen].tolist(), strict=True)
    low, high, start, end = shown.low[chosen], shown.high[chosen], shown.start[chosen], shown.end[chosen]
    figure.add_bar(
        orientation="h",
        base=start,
        x=end - start,
        y=(low + high) / 2,
        width=high - low,
        customdata=[_hover(trace.blocks[i], offset) for i, offset in places],
        hovertemplate="%{customdata}<extra></extra>",
        marker={
            "color": np.log2(shown.nbytes[chosen]),
            "coloraxis": "coloraxis",
            "line": {"color": "white", "width": 0.5},
        },
        row=row,
        col=1,
    )


def _hover(block: Block, offset: int) -> str:
    pieces = ", ".join(f"{start} to {end}" for start, end in block.pieces)
    size = f"{format_bytes(block.nbytes)} ({block.nbytes} bytes)"
    return f"<b>{escape(name_of(block))}</b><br>{size}<br>live from {pieces}<br>offset {offset}"


def _add_shapes(figure: Any, shown: AddressMap, chosen: NDArray[np.int64], colours: list[float], row: int) -> None:
    """The chosen rectangles without what they are, those of about one size in one shape."""
    from plotly.colors import sample_colorscale  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional library

    share = np.clip((np.log2(shown.nbytes[chosen]) - colours[0]) / (colours[1] - colours[0]), 0, 1)
    shades = np.round(share * (SHADES - 1)).astype(np.int64)
    for shade in np.unique(shades).tolist():
        some = chosen[shades == shade]
        low, high, start, end = shown.low[some], shown.high[some], shown.start[some], shown.end[some]
        apart = np.full(len(some), np.nan)  # lifts the pen
        figure.add_scatter(
            x=np.stack([start, start, end, end, start, apart], axis=1).ravel(),
            y=np.stack([low, high, high, low, low, apart], axis=1).ravel(),
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=sample_colorscale(COLOURSCALE, [shade / (SHADES - 1)])[0],
            hoverinfo="skip",
            row=row,
            col=1,
        )
