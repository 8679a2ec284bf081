"""Plot memory over one step, planned and unmanaged, with matplotlib. `pages/plan.py` makes the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overspill.core import Timeline
from overspill.core.errors import RequestError
from overspill.core.units import format_bytes
from overspill.plans.plan import Plan

from .plan import limits_of
from .plot import COLOURS, GIB, check_plot

SIZE_INCHES = (9.0, 4.4)
TIME_AXIS, MEMORY_AXIS = "simulated time of one step (s)", "memory on the device (GiB)"


@dataclass(frozen=True)
class MemoryCurve:
    """Memory over time, in GiB.

    From `seconds[i]` to `seconds[i + 1]` the device holds `gib[i]`, and in the end `gib[-1]`.
    """

    label: str
    colour: str
    seconds: tuple[float, ...]
    gib: tuple[float, ...]


def curve_of(timeline: Timeline, label: str, colour: str) -> MemoryCurve:
    """The most bytes on the device during each instruction.

    Only instructions that take time count.
    """
    seconds, gib = [0.0], []
    highest = 0
    for nbytes, ended in zip(timeline.live_bytes, timeline.clock_seconds, strict=True):
        highest = max(highest, nbytes)
        if ended > seconds[-1]:
            seconds.append(ended)
            gib.append(highest / GIB)
            highest = 0
    gib.append(highest / GIB if highest or not gib else gib[-1])
    return MemoryCurve(f"{label}: {format_bytes(timeline.peak_bytes)}", colour, tuple(seconds), tuple(gib))


def plot_memory(plan: Plan, path: Path, title: str) -> None:
    """Plot `plan` and the unmanaged step to the file `path`. Raises RequestError where that cannot be done."""
    check_plot(path)
    curves = (
        curve_of(plan.unmanaged_timeline, "without a budget", COLOURS[1]),
        curve_of(plan.timeline, f"within it, {plan.schedule.policy}", COLOURS[0]),
    )
    try:
        _draw_png(curves, limits_of(plan), path, title)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}; name another file") from None


def _draw_png(curves: tuple[MemoryCurve, ...], limits: list[tuple[str, int]], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional library
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        axes.fill_between(curve.seconds, curve.gib, step="post", color=curve.colour, alpha=0.15, linewidth=0)
        axes.step(curve.seconds, curve.gib, where="post", color=curve.colour, linewidth=1.2, label=curve.label)
    # Limits as horizontal lines.
    for style, (what, nbytes) in zip(("--", ":"), limits, strict=False):
        label = f"{what}: {format_bytes(nbytes)}"
        axes.axhline(nbytes / GIB, color="0.25", linestyle=style, linewidth=1, label=label)
    # Axes and legend.
    axes.set(title=title, xlabel=TIME_AXIS, ylabel=MEMORY_AXIS)
    axes.set_xlim(0, max(curve.seconds[-1] for curve in curves))
    axes.set_ylim(0)
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
