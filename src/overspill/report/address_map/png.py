"""An address map as PNG, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overspill.core import Trace
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

LINES = {"solid": "-", "dash": "--"}
COLOURMAP = "viridis"
MOST_NAMED = 60
_WIDTH_INCHES = 10.0
_MAP_PIXELS = (1200.0, 600.0)
"""About how large the map is."""
_OUTLINED_PIXELS = 6
_LUMA = np.array([0.299, 0.587, 0.114])
_LETTER_SHARE = (0.0095, 0.028)
"""About what a letter takes of the map's width and height."""


def draw_png(trace: Trace, maps: Sequence[AddressMap], path: Path, title: str, capacity_bytes: int | None) -> None:
    """Draw `maps` of `trace` below one another to `path`."""
    from matplotlib import colormaps  # noqa: PLC0415 - an optional library
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import LogNorm  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: PLC0415

    heights = [height for _ in maps for height in (MAP_HEIGHT, LIVE_HEIGHT)]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    # One colour scale for all maps.
    sizes = size_range(maps)
    colours = ScalarMappable(LogNorm(*sizes), colormaps[COLOURMAP])
    ticks = powers_of_2(*sizes)
    extend = "min" if any((shown.nbytes < sizes[0]).any() for shown in maps) else "neither"
    for shown, axes, below in zip(maps, rows[::2], rows[1::2], strict=True):
        # Blocks, their names, and the lines across them.
        top = shown.top(capacity_bytes)
        _draw_blocks(axes, shown, colours, top)
        if len(shown) <= MOST_NAMED:
            _write_names(axes, trace, shown, colours, top)
        for at, text, colour, style in lines(shown, capacity_bytes):
            axes.axhline(at, color="white", linewidth=2.4, alpha=0.6)  # for the line to be seen on dark blocks
            axes.axhline(at, color=colour, linestyle=LINES[style], linewidth=1.2, label=text)
        axes.set(xlim=shown.time_range, ylim=(0, top), ylabel=address_axis(shown, maps))
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize="small")
        # Live bytes below the map.
        below.fill_between(shown.times, shown.live, step="post", color=LIVE_COLOUR, alpha=0.25, linewidth=0)
        below.step(shown.times, shown.live, where="post", color=LIVE_COLOUR, linewidth=0.8)
        below.axhline(shown.bound, color=BOUND_COLOUR, linestyle="--", linewidth=1)
        below.set(ylim=(0, top), ylabel=f"live ({shown.unit})")
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize="medium", parse_math=False)
    # Axis labels and the colour bar.
    rows[-1].set_xlabel(TIME_AXIS)
    rows[-1].xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:,g}" if abs(at) < 1e5 else f"{at:,.0f}"))
    bar = figure.colorbar(colours, ax=list(rows), label=SIZE_AXIS, pad=0.01, aspect=40, ticks=ticks, extend=extend)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: format_bytes(nbytes)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    figure.savefig(path, dpi=150)


def _draw_blocks(axes: Any, shown: AddressMap, colours: Any, top: float) -> None:
    """Draw the rectangles.

    One that is thinner than a pixel is a line below the others, to be seen where nothing else is.
    """
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - an optional library

    left, right, low, high = shown.start, shown.end, shown.low, shown.high
    corners: Any = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    first, last = shown.time_range
    pixels = np.minimum((right - left) / (last - first) * _MAP_PIXELS[0], (high - low) / top * _MAP_PIXELS[1])
    faces = colours.to_rgba(shown.nbytes)
    # Thin rectangles as lines, the others with an outline if large enough.
    thin, seen = pixels < 1, pixels >= 0.1  # what is thinner hardly decides any pixel's colour
    axes.add_collection(
        PolyCollection(corners[thin], facecolors=faces[thin], edgecolors="face", linewidths=0.3, rasterized=True)
    )
    outlined = pixels[seen] >= _OUTLINED_PIXELS
    edges, widths = np.where(outlined[:, None], 1.0, faces[seen]), np.where(outlined, 0.4, 0.0)
    shapes = PolyCollection(corners[seen], facecolors=faces[seen], edgecolors=edges, linewidths=widths)
    shapes.set(antialiased=False, rasterized=True)
    axes.add_collection(shapes)


def _write_names(axes: Any, trace: Trace, shown: AddressMap, colours: Any, top: float) -> None:
    """Write the names of blocks into them, where there is room."""
    first, last = shown.time_range
    faces = colours.to_rgba(shown.nbytes)
    for i, position in enumerate(shown.block.tolist()):
        left, right, low, high = shown.start[i], shown.end[i], shown.low[i], shown.high[i]
        name = name_of(trace.blocks[position])
        wide = (right - left) / (last - first) >= len(name) * _LETTER_SHARE[0]
        if wide and (high - low) / top >= _LETTER_SHARE[1]:
            ink = "black" if faces[i, :3] @ _LUMA > 0.5 else "white"
            place = ((left + right) / 2, (low + high) / 2)
            axes.text(*place, name, ha="center", va="center", fontsize=7, color=ink, parse_math=False)
