"""A chart or view of a page as a picture, `--plot FILE.png`, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from overspill.core.errors import RequestError
from overspill.core.text import pip_install
from overspill.core.units import format_bytes

from .page import Lines, Mark, Points, Section, Step, StepRun
from .page.sections import Axis, Floats, Integers
from .tables import Unit, written

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#44AA99")
"""Okabe and Ito's colours, which colour-blind readers can distinguish, without the yellow that is too pale on white;
then Tol's."""
SIZE_INCHES = (9.0, 5.0)
MOST_LETTERS, MOST_TICKS = 100, 8
MOST_NAMED = 60
"""With more rectangles than this, none has its name in it."""
OFFSETS = [(7, y, "left") for y in (0, 14, -14, 28, -28)] + [(-7, y, "right") for y in (0, 14, -14, 28, -28)]
"""The candidate positions of a label, in points from the point that it names."""
LETTER_POINTS = (6.3, 12.0)


def check_plot(path: Path) -> None:
    """Raise RequestError, before any work, if `path` cannot become a picture."""
    if path.suffix.lower() != ".png":
        raise RequestError(f"cannot plot to {path}: the file must end in .png; --report FILE.html writes a page")
    if find_spec("matplotlib") is None:
        raise RequestError(f"a plot in a .png file needs matplotlib: {pip_install('plot')}")


def draw(section: Section, path: Path, title: str) -> None:
    """Draw `section` to `path`: a chart, memory over a step, or addresses over time, but not a table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional library
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    match section:
        case Lines() | Points():
            _chart(axes, section)
        case Step(runs=(run,)):
            _addresses(figure, axes, section, run)
        case Step():
            _memory(axes, section)
    axes.set_title(title if len(title) <= MOST_LETTERS else f"{title[:MOST_LETTERS]}…", fontsize=10, parse_math=False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}; name another file") from None


def _chart(axes: Any, chart: Lines | Points) -> None:
    """Draw curves, points with their names, and lines across."""
    for curve, colour in zip(chart.curves, COLOURS * len(chart.curves), strict=False):
        style = {"linestyle": "--", "color": "0.4"} if curve.dashed else {"color": colour}
        axes.plot(curve.x, curve.y, drawstyle="steps-post" if curve.steps else "default", label=curve.name, **style)
    points = chart.points if isinstance(chart, Points) else ()
    for at, point in enumerate(points):
        axes.plot([point.x], [point.y], color=COLOURS[at % len(COLOURS)], markersize=9, **_marker(good=point.good))
    if points:
        for good, words in ((True, "fits"), (False, "does not fit")):  # for the legend alone
            axes.plot([], [], color="0.4", label=words, **_marker(good=good))
    for mark in chart.marks:
        across, unit = (axes.axvline, chart.x.unit) if mark.on_x else (axes.axhline, chart.y.unit)
        across(mark.at, color="0.4", linestyle=":", linewidth=1, label=f"{mark.name}: {written(mark.at, unit)}")
    axes.margins(0.15)
    _scale(axes, chart.x, chart.y)
    _name(axes, [(point.name, point.x, point.y) for point in points], [mark.at for mark in chart.marks if mark.on_x])


def _marker(*, good: bool) -> dict[str, Any]:
    return {"marker": "o" if good else "X", "linestyle": "", "markeredgewidth": 0}


def _name(axes: Any, points: Sequence[tuple[str, float, float]], lines: Sequence[float]) -> None:
    """Write each name next to its point, where it covers the fewest points, lines and other names."""

    def place(x: float, y: float) -> Any:
        return axes.transData.transform((x, y)) * 72 / axes.figure.dpi

    at = [place(*point) for _, *point in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    taken += [(x - 1, -math.inf, x + 1, math.inf) for x, _ in (place(line, axes.get_ylim()[0]) for line in lines)]
    for number, ((name, *point), (x, y)) in enumerate(zip(points, at, strict=True)):
        boxes = []
        for dx, dy, side in OFFSETS:
            left = x + dx - (len(name) * LETTER_POINTS[0] if side == "right" else 0)
            boxes.append((left, y + dy - 6, left + len(name) * LETTER_POINTS[0], y + dy + LETTER_POINTS[1] / 2))
        best = min(range(len(OFFSETS)), key=lambda i: _collisions(boxes[i], taken))
        taken.append(boxes[best])
        dx, dy, side = OFFSETS[best]
        colour = COLOURS[number % len(COLOURS)]
        axes.annotate(name, point, (dx, dy), textcoords="offset points", ha=side, va="center", color=colour)


def _collisions(box: Sequence[float], taken: Sequence[Sequence[float]]) -> int:
    return sum(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)


def _scale(axes: Any, x: Axis, y: Axis) -> None:
    """Name the axes, and write their numbers in their units, bytes at multiples of a power of 2."""
    from matplotlib.ticker import MultipleLocator  # noqa: PLC0415 - an optional library

    axes.set(xlabel=x.name, ylabel=y.name)
    for axis, unit in ((axes.xaxis, x.unit), (axes.yaxis, y.unit)):
        if unit is not Unit.NUMBER:
            axis.set_major_formatter(lambda value, _, unit=unit: written(value, unit))
        low, high = axis.get_view_interval()
        if unit is Unit.BYTES and high > low:
            axis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2((high - low) / MOST_TICKS))))
    axes.grid(visible=True, alpha=0.3)


def _memory(axes: Any, step: Step) -> None:
    """Draw the memory of each run of a step over its time."""
    for number, run in enumerate(step.runs):
        seconds, nbytes = memory_over_time(run)
        colour, label = COLOURS[number % len(COLOURS)], f"{run.name}: {format_bytes(nbytes.max(initial=0))}"
        axes.fill_between(seconds, nbytes, step="post", color=colour, alpha=0.15, linewidth=0)
        axes.step(seconds, nbytes, where="post", color=colour, linewidth=1.2, label=label)
    _across(axes, [*step.marks, *(mark for run in step.runs for mark in run.marks)])
    axes.set(xlim=(0, max((run.seconds[-1] for run in step.runs if len(run.seconds)), default=None)), ylim=(0, None))
    _scale(axes, Axis("simulated time of one step", Unit.SECONDS), Axis("memory on the device", Unit.BYTES))


def memory_over_time(run: StepRun) -> tuple[Floats, Integers]:
    """Return the most bytes on the device from each of these seconds to the next, and finally after them."""
    live = live_bytes(run)
    # Instructions that end at one time are one stretch of it, with the most that they have.
    ends, first = np.unique(run.seconds, return_index=True)
    if len(ends) > 1 and not ends[0]:
        ends, first = ends[1:], np.concatenate([[0], first[2:]])
    most = np.maximum.reduceat(live, first) if len(first) else live[:0]
    return np.concatenate([[0.0], ends]), np.concatenate([most, live[-1:]])


def live_bytes(run: StepRun) -> Integers:
    """Return the bytes on the device at each position."""
    change = np.zeros(run.positions + 1, dtype=np.int64)
    np.add.at(change, run.start, run.nbytes)
    np.add.at(change, run.end, -run.nbytes)
    return np.cumsum(change)[:-1]


def _across(axes: Any, marks: Sequence[Mark]) -> None:
    for mark, style in zip(marks, ("--", ":", "-."), strict=False):
        label = f"{mark.name}: {format_bytes(mark.at)}"
        axes.axhline(mark.at, color="0.25", linestyle=style, linewidth=1, label=label)


def _addresses(figure: Any, axes: Any, step: Step, run: StepRun) -> None:
    """Draw a rectangle for each block, over its times and addresses, coloured by size, and draw the live bytes."""
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415 - an optional library
    from matplotlib.collections import PolyCollection  # noqa: PLC0415
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    left, right, low, high = run.start, run.end, run.offset, run.offset + run.nbytes
    corners: Any = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    least, most = int(run.nbytes.min(initial=1 << 40)) or 1, int(run.nbytes.max(initial=1))
    colours = ScalarMappable(LogNorm(min(least, most), max(2 * least, most)), "viridis")
    few = len(left) <= MOST_NAMED
    edges, faces = "white" if few else "face", colours.to_rgba(run.nbytes)
    axes.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=edges, linewidths=0.4, rasterized=True))
    for at in range(len(left)) if few else ():
        name, middle = step.tensors.name[run.tensor[at]], ((left[at] + right[at]) / 2, (low[at] + high[at]) / 2)
        style = {"ha": "center", "va": "center", "fontsize": 7, "parse_math": False, "clip_on": True}
        axes.text(*middle, name, color="black" if faces[at, :3].mean() > 0.5 else "white", **style)
    live = live_bytes(run)
    label = f"live bytes, at most {format_bytes(live.max(initial=0))}"
    axes.step(np.arange(len(live) + 1), [*live, *live[-1:]], where="post", color=COLOURS[1], linewidth=1, label=label)
    top = max(1, int(high.max(initial=0)))
    _across(axes, [Mark("the layout", run.reserved_bytes or 0), *(mark for mark in step.marks if mark.at <= 2 * top)])
    axes.set(xlim=(0, run.positions), ylim=(0, None))
    _scale(axes, Axis(step.words.position), Axis("address", Unit.BYTES))
    powers = range(math.ceil(math.log2(least)), math.floor(math.log2(max(2 * least, most))) + 1)
    bar = figure.colorbar(colours, ax=axes, label="size of the block", pad=0.01)
    bar.set_ticks([2.0**p for p in powers][:: -(-len(powers) // MOST_TICKS)], minor=False)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter(lambda nbytes, _: format_bytes(nbytes))
