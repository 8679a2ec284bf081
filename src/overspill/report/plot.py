"""Plot policies as points of memory and slowdown, with matplotlib.

One labelled point a policy; `pages/compare.py` makes the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from overspill.core.errors import RequestError

GIB = 1 << 30
# Okabe and Ito's, which the colour-blind tell apart, without the yellow that is too pale on white; then some of Tol's.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#882255", "#999933", "#332288", "#44AA99", "#AA4499"),
)
LIVE_AXIS, CARD_AXIS, TIME_AXIS = (
    "maximum memory (GiB)",
    "card (GiB)",
    "simulated slowdown (step time over that of {baseline})",
)
VERDICTS = {True: "fits", False: "does not fit"}
SIZE_INCHES = (9.0, 5.5)
_AXES_POINTS = (600.0, 345.0)
"""About what the axes take of the picture; a label's letter is about `_LETTER_POINTS` wide and high."""
_LETTER_POINTS = (6.3, 12.0)


class Place(NamedTuple):
    """The offset of a label from its point, in points.

    And which of the label's sides is there.
    """

    offset: tuple[int, int]
    horizontal: Literal["left", "center", "right"]
    vertical: Literal["bottom", "center", "top"]


PLACES = (
    Place((7, 0), "left", "center"),
    Place((-7, 0), "right", "center"),
    Place((0, 7), "center", "bottom"),
    Place((0, -7), "center", "top"),
    *(Place((7, 14 * rows), "left", "center") for rows in (1, -1, 2, -2)),
    *(Place((-7, 14 * rows), "right", "center") for rows in (1, -1, 2, -2)),
)


@dataclass(frozen=True)
class PolicyPoint:
    """One policy in the plot."""

    name: str
    gib: float
    slowdown: float
    fits: bool
    colour: str
    place: Place = PLACES[0]


@dataclass(frozen=True)
class Picture:
    """A plot's points, budget and axis ranges. The ranges leave room for the labels."""

    title: str
    memory_axis: str
    time_axis: str
    points: tuple[PolicyPoint, ...]
    budget_gib: float
    memory_range: tuple[float, float]
    time_range: tuple[float, float]


def check_plot(path: Path) -> None:
    """Raise RequestError, before any work, if `path` cannot become a plot."""
    if path.suffix.lower() != ".png":
        raise RequestError(f"cannot plot to {path}: the file must end in .png; --report FILE.html writes a page")
    if find_spec("matplotlib") is None:
        raise RequestError("a plot in a .png file needs matplotlib: pip install overspill[plot]")


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str, budget_bytes: int, baseline: str) -> None:
    """Plot `rows` of a comparison to the file `path`.

    Each is as `report.compare.row_figures` gives it; rows without figures are left out.
    """
    check_plot(path)
    made = picture(rows, title, budget_bytes, baseline)
    try:
        _draw_png(made, path)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}; name another file") from None


def picture(rows: Sequence[Mapping[str, Any]], title: str, budget_bytes: int, baseline: str) -> Picture:
    """The plot of `rows`, with labels that do not overlap.

    From the least memory to the most.
    """
    of_card = any(row["device_bytes"] is not None for row in rows)
    needed = "device_bytes" if of_card else "max_bytes"
    known = sorted((r for r in rows if r[needed] is not None), key=lambda r: (r[needed], r["slowdown"]))
    points = [
        PolicyPoint(row["policy"], row[needed] / GIB, row["slowdown"], row["fits"], COLOURS[i % len(COLOURS)])
        for i, row in enumerate(known)
    ]
    budget_gib = budget_bytes / GIB
    slowdowns = [p.slowdown for p in points] or [1.0]
    margin = 0.15 * max(max(slowdowns) - min(slowdowns), 0.05)
    memory_range = (0.0, 1.15 * max([budget_gib, *(p.gib for p in points)]))
    time_range = (min(slowdowns) - margin, max(slowdowns) + margin)
    placed = _placed(points, budget_gib, memory_range, time_range)
    axes = CARD_AXIS if of_card else LIVE_AXIS, TIME_AXIS.format(baseline=baseline)
    return Picture(title, *axes, placed, budget_gib, memory_range, time_range)


Box = tuple[float, float, float, float]
"""Left, bottom, right and top in points of the page."""


def _placed(
    points: Sequence[PolicyPoint], budget_gib: float, memory_range: tuple[float, float], time_range: tuple[float, float]
) -> tuple[PolicyPoint, ...]:
    """`points` with each label placed to overlap as little as possible.

    A label takes the first free place, or the one that meets the fewest others, points and line.
    """
    at = [
        (
            p.gib / memory_range[1] * _AXES_POINTS[0],
            (p.slowdown - time_range[0]) / (time_range[1] - time_range[0]) * _AXES_POINTS[1],
        )
        for p in points
    ]
    # Labels keep clear of points, of the budget's line and of one another.
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    line = budget_gib / memory_range[1] * _AXES_POINTS[0]
    taken.append((line - 1, 0.0, line + 1, _AXES_POINTS[1]))
    found = []
    for point, (x, y) in zip(points, at, strict=True):
        boxes = [_box(place, x, y, len(point.name)) for place in PLACES]
        best = min(range(len(PLACES)), key=lambda i: _collisions(boxes[i], taken))
        taken.append(boxes[best])
        found.append(replace(point, place=PLACES[best]))
    return tuple(found)


def _box(place: Place, x: float, y: float, letters: int) -> Box:
    """The rectangle of a label at `place` of the point (x, y). It has so many letters."""
    width, height = letters * _LETTER_POINTS[0], _LETTER_POINTS[1]
    left = x + place.offset[0] - {"left": 0.0, "center": 0.5, "right": 1.0}[place.horizontal] * width
    bottom = y + place.offset[1] - {"bottom": 0.0, "center": 0.5, "top": 1.0}[place.vertical] * height
    return left, bottom, left + width, bottom + height


def _collisions(box: Box, taken: Sequence[Box]) -> int:
    """The number of `taken` boxes that `box` overlaps. Leaving the picture counts as one."""
    outside = box[0] < 0 or box[1] < 0 or box[2] > _AXES_POINTS[0] or box[3] > _AXES_POINTS[1]
    return outside + sum(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
    )


def _draw_png(made: Picture, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional library
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(made.budget_gib, color="0.4", linestyle="--", linewidth=1, label=f"budget, {made.budget_gib:.2f} GiB")
    for fits, verdict in VERDICTS.items():  # for the legend alone
        axes.plot([], [], color="0.4", linestyle="", markersize=8, label=verdict, **_marker(fits))
    # A marker and a label for each policy.
    for point in made.points:
        axes.plot([point.gib], [point.slowdown], color=point.colour, linestyle="", markersize=9, **_marker(point.fits))
        axes.annotate(
            point.name, (point.gib, point.slowdown), point.place.offset, textcoords="offset points",
            color=point.colour, ha=point.place.horizontal, va=point.place.vertical,
        )  # fmt: skip
    # Axes and legend.
    axes.set(
        title=made.title, xlabel=made.memory_axis, ylabel=made.time_axis, xlim=made.memory_range, ylim=made.time_range
    )
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower right", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _marker(fits: bool) -> dict[str, Any]:
    return {"marker": "o"} if fits else {"marker": "X", "markeredgewidth": 0}
