"""A budget sweep, as JSON rows, a table and a sentence."""

from __future__ import annotations

from math import ceil
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes
from overspill.plans.comparison import chosen_by
from overspill.plans.sweep import Sweep, SweepPoint

from .listing import percent, recomputed
from .tables import Column, Table, Unit, printed

FIGURES = ("peak_bytes", "device_bytes", "step_seconds", "slowdown", "gap", "offloaded_bytes", "recomputed_flops", "recomputed_ops", "fits")  # fmt: skip
"""What a row has of a plan; null where there is none."""
COLUMNS = {
    "policy": Column("policy"),
    "chosen": Column("chose"),
    "budget_share": Column("share", Unit.SHARE),
    "budget_bytes": Column("budget", Unit.BYTES, bar=True),
    "peak_bytes": Column("live", Unit.BYTES),
    "fits": Column("fits"),
    "step_seconds": Column("simulated step", Unit.SECONDS, short="step"),
    "slowdown": Column("slowdown", Unit.RATIO),
    "lower_bound_seconds": Column("bound", Unit.SECONDS),
    "gap": Column("gap", Unit.SHARE),
    "offloaded_bytes": Column("offloaded", Unit.BYTES),
    "recomputed": Column("recomputed", Unit.NUMBER),
}
SMALL_SLOWDOWN = 1.05


def point_figures(sweep: Sweep, point: SweepPoint) -> dict[str, Any]:
    """The JSON object of one point of a sweep."""
    head = {
        "policy": point.policy,
        "budget_bytes": point.budget_bytes,
        "budget_share": point.budget_bytes / sweep.unmanaged_bytes if sweep.unmanaged_bytes else 1.0,
        "feasible": point.plan is not None,
        "lower_bound_seconds": point.lower_bound_seconds,
        "error": point.error,
        "chosen": {} if point.plan is None else chosen_by(point.policy, point.plan),
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
    return percent(_up(share), 1)


def _up(share: float) -> float:
    return ceil(1000 * share) / 1000


def sweep_verdict(sweep: Sweep) -> str:
    """A sentence: how far memory goes down, at which cost.

    And how far before it costs much.
    """
    frontier = sweep.frontier
    least = frontier[-1]
    assert least.plan is not None
    unmanaged = sweep.unmanaged_bytes
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
        printed(sweep_table(sweep), close=True),
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


def sweep_table(sweep: Sweep) -> Table:
    """A table of every plan, the largest budget first."""
    rows = [point_figures(sweep, point) for point in sweep.points if point.plan is not None]
    # What is the same in all rows has no column; live bytes differ from budgets only of a card.
    said = {
        "policy": len({row["policy"] for row in rows}) > 1,
        "peak_bytes": any(row["device_bytes"] is not None for row in rows),
        "fits": not all(row["fits"] for row in rows),
        "chosen": any(row["chosen"] for row in rows),
    }
    keys = [key for key in COLUMNS if said.get(key, True)]
    shown = [row | _shown(row) for row in rows]
    cells = tuple(tuple(row[key] for key in keys) for row in shown)
    return Table("Every plan", tuple(COLUMNS[key] for key in keys), cells)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """What a table shows otherwise than JSON: a share that suffices, nothing for what is not there, and words."""
    return {
        "chosen": ", ".join(f"{name} {value}" for name, value in row["chosen"].items()),
        "budget_share": _up(row["budget_share"]),
        "offloaded_bytes": row["offloaded_bytes"] or None,
        "recomputed": recomputed(row["recomputed_flops"], row["recomputed_ops"]),
    }
