"""A budget sweep, as JSON rows, a table and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.core.units import format_bytes, format_seconds
from overspill.plans.sweep import Sweep, SweepPoint

from .listing import recomputed, whole_columns, yes

FIGURES = ("peak_bytes", "device_bytes", "step_seconds", "slowdown", "gap", "offloaded_bytes", "recomputed_flops", "recomputed_ops", "fits")  # fmt: skip
"""What a row has of a plan; null where there is none."""
SMALL_SLOWDOWN = 1.05


def point_figures(sweep: Sweep, point: SweepPoint) -> dict[str, Any]:
    """The JSON object of one point of a sweep."""
    head = {
        "policy": point.policy,
        "budget_bytes": point.budget_bytes,
        "budget_share": point.budget_bytes / sweep.unmanaged_needed_bytes if sweep.unmanaged_needed_bytes else 1.0,
        "feasible": point.plan is not None,
        "lower_bound_seconds": point.lower_bound_seconds,
        "error": point.error,
    }
    # A budget without a plan has no figures.
    plan = point.plan
    if plan is None:
        return head | dict.fromkeys(FIGURES)
    return head | {
        "peak_bytes": plan.peak_bytes,
        "device_bytes": plan.device_bytes,
        "step_seconds": plan.step_seconds,
        "slowdown": plan.slowdown,
        "gap": point.gap,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "recomputed_ops": plan.recomputed_ops,
        "fits": sweep.fits(point),
    }


def share_up(share: float) -> str:
    """A share in percent, rounded up, so that it suffices as a budget."""
    return f"{ceil(1000 * share) / 10:.1f} %"


def sweep_verdict(sweep: Sweep) -> str:
    """A sentence: how far memory goes down, at which cost.

    And how far before it costs much.
    """
    frontier = sweep.frontier
    least = frontier[-1]
    assert least.plan is not None
    unmanaged = sweep.unmanaged_needed_bytes
    text = (
        f"from {format_bytes(unmanaged)} down to {format_bytes(least.budget_bytes)} "
        f"({share_up(least.budget_bytes / unmanaged)}), where a step takes {least.plan.slowdown:.3f} times as long"
    )
    cheap = [p for p in frontier if p.plan is not None and p.plan.slowdown <= SMALL_SLOWDOWN]
    if cheap and cheap[-1] is not least and cheap[-1].budget_bytes < unmanaged:
        text += f"; within {format_bytes(cheap[-1].budget_bytes)} ({share_up(cheap[-1].budget_bytes / unmanaged)}) at most 5 % longer"
    return text


def sweep_report(sweep: Sweep, title: str, note: str | None = None) -> RenderableType:
    """The verdict and the table of all points, with notes."""
    explanation = (
        f"Times are simulated for {sweep.device.name}, not measured; slowdown is to the step without a budget. "
        "Bound: no plan within the budget takes less; gap: how far the plan is above it."
    )
    if sweep.device.index is not None:
        explanation += " Budgets are sizes of the card, with its context and what PyTorch's allocator takes; live is what tensors take of that."
    explanation += " A share of the first column, as --budget, gives plan and train the plan of its row."
    parts: list[RenderableType] = [
        Text(title),
        "",
        _table(sweep),
        "",
        Text(sweep_verdict(sweep)),
        "",
        Text(explanation),
    ]
    # Why memory goes no lower, by policy.
    remarks = [
        f"{name}: not below {format_bytes(floor.nbytes)} ({floor.cause})" for name, floor in sweep.floors.items()
    ]
    return Group(*parts, *map(Text, remarks), *([Text(note)] if note else []))


def _table(sweep: Sweep) -> Table:
    rows = [point_figures(sweep, point) for point in sweep.points]
    has_card = any(row["device_bytes"] is not None for row in rows)
    shows_fit = any(row["fits"] is False for row in rows)
    several = len({row["policy"] for row in rows}) > 1
    columns = (
        *(["policy"] if several else []),
        *(
            "share",
            "budget",
            *(["live"] if has_card else []),
            *(["fits"] if shows_fit else []),
            "step",
            "slowdown",
            "bound",
            "gap",
            "offloaded",
        ),
        "recomputed",
    )
    numbers = [index for index, name in enumerate(columns) if name not in {"policy", "fits"}]
    # Only points with a plan have a row.
    feasible = [row for row in rows if row["feasible"]]
    return whole_columns(
        columns,
        [_cells(row, has_card=has_card, shows_fit=shows_fit, several=several) for row in feasible],
        numbers=numbers,
    )


def _cells(row: dict[str, Any], *, has_card: bool, shows_fit: bool, several: bool) -> Sequence[str]:
    live = [format_bytes(row["peak_bytes"])] if has_card else []
    return (
        *([row["policy"]] if several else []),
        share_up(row["budget_share"]),
        format_bytes(row["budget_bytes"]),
        *live,
        *([yes(row["fits"]) or "no"] if shows_fit else []),
        format_seconds(row["step_seconds"]),
        f"{row['slowdown']:.3f}",
        format_seconds(row["lower_bound_seconds"]),
        f"{100 * row['gap']:.1f} %",
        format_bytes(row["offloaded_bytes"]) if row["offloaded_bytes"] else "",
        recomputed(row["recomputed_flops"], row["recomputed_ops"]),
    )
