"""A budget sweep: JSON rows, and the page of memory against time, with the bound and a table of every plan."""

from __future__ import annotations

from math import ceil
from typing import Any

from overspill.core.units import format_bytes
from overspill.plans.comparison import chosen_by
from overspill.plans.sweep import Sweep, SweepPoint

from .compare import TIME, bound_curve
from .listing import percent, recomputed
from .page import Axis, Column, Curve, Figure, Lines, Mark, Page, Point, Points, Table, Unit, Verdict
from .plan import pool_notes

FIGURES = ("peak_bytes", "device_bytes", "step_seconds", "slowdown", "gap", "offloaded_bytes", "recomputed_flops",
    "recomputed_ops", "model_on_host", "pool", "fits")  # fmt: skip
"""The plan's figures in a row; null without a plan."""
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
MEMORY = Axis("budget", Unit.BYTES)
OF_CARD = (
    "Budgets are sizes of the card, with its context and what each policy's own pool takes; live is what tensors take "
    "of that."
)


def point_figures(sweep: Sweep, point: SweepPoint) -> dict[str, Any]:
    """Return the JSON object of one point of a sweep."""
    head = {
        "policy": point.policy,
        "budget_bytes": point.budget_bytes,
        "budget_share": sweep.share_of(point.budget_bytes) if sweep.unmanaged_bytes else 1.0,
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
        "model_on_host": plan.model_on_host,
        "pool": plan.pool,
        "fits": sweep.fits(point),
    }


def _on_host(sweep: Sweep) -> list[str]:
    """Return a note on the budgets at which the model begins on the CPU, if there are any."""
    budgets = [point.budget_bytes for point in sweep.points if point.plan is not None and point.plan.model_on_host]
    return [f"Up to {format_bytes(max(budgets))} the model does not fit, and begins on the CPU."] if budgets else []


def sweep_page(sweep: Sweep, title: str | None = None) -> Page:
    """Return the report of `sweep`."""
    name = title or f"{sweep.points[0].plan.graph.name if sweep.points[0].plan else 'step'} at every budget"
    notes = (
        f"Times are simulated for {sweep.device.name}, not measured. Slowdown is to the step without a budget.",
        (
            "Bound: no plan within that budget takes less, by any policy that keeps the graph's order; gap: how far "
            "the plan is above it."
        ),
        (
            "A share, as --budget, gives plan and train the plan of its row. A larger budget whose plan is slower is "
            "left out."
        ),
        *(() if sweep.unmanaged_device_bytes is None else (OF_CARD,)),
        *pool_notes(point.plan.pool for point in sweep.points if point.plan is not None),
        *_on_host(sweep),
        *(f"{name}: not below {format_bytes(floor.nbytes)} ({floor.cause})" for name, floor in sweep.floors.items()),
    )
    return Page(name, sweep_verdict(sweep), (_curves(sweep), sweep_table(sweep)), notes)


def sweep_verdict(sweep: Sweep) -> Verdict:
    """Return how far memory goes down, and whether that fits the device."""
    least = sweep.frontier[-1]
    assert least.plan is not None
    fitting = [point for point in sweep.points if sweep.fits(point)]
    unmanaged = sweep.unmanaged_bytes
    of_card = sweep.unmanaged_device_bytes is not None
    whole = sweep.whole_bytes or unmanaged
    worst = "" if whole == unmanaged else f"; {format_bytes(whole)}, the budget of 100 %, in the worst case"
    figures = [
        Figure("unmanaged", format_bytes(unmanaged), f"the card that it needs{worst}" if of_card else "live bytes"),
        Figure(
            "smallest budget", format_bytes(least.budget_bytes), f"{share_up(least.budget_bytes / unmanaged)} of that"
        ),
        Figure("slowdown there", f"{least.plan.slowdown:.3f}", f"simulated, by {least.policy}"),
    ]
    # For a GPU, also the size of its memory.
    if of_card:
        figures.append(Figure(f"{sweep.device.name} has", format_bytes(sweep.device.memory_bytes)))
    text = _sentence(sweep)
    return Verdict(text[0].upper() + text[1:], bool(fitting), tuple(figures))


def _curves(sweep: Sweep) -> Lines | Points:
    """Return a curve or point for each policy, and the bound. A policy that makes one schedule has a point."""
    found: dict[str, list[SweepPoint]] = {}
    for point in sorted(sweep.points, key=lambda point: point.budget_bytes):
        if point.plan is not None:
            found.setdefault(point.policy, []).append(point)
    # Policies with several plans are curves, above the bound.
    curves = [
        Curve(policy, [p.budget_bytes for p in own], [p.plan.step_seconds for p in own if p.plan], steps=True)
        for policy, own in found.items()
        if len(own) > 1
    ]
    curves.append(bound_curve({point.budget_bytes: point.lower_bound_seconds for point in sweep.points}))
    # Policies with one plan are points.
    single = tuple(
        Point(policy, own[0].budget_bytes, own[0].plan.step_seconds, good=sweep.fits(own[0]))
        for policy, own in found.items()
        if len(own) == 1 and own[0].plan is not None
    )
    unmanaged = sweep.unmanaged_bytes
    whole = sweep.device.usable_bytes if sweep.unmanaged_device_bytes is None else sweep.device.memory_bytes
    marks = [Mark("unmanaged", unmanaged, on_x=True)]
    if whole < unmanaged:
        marks.append(Mark(f"all of {sweep.device.name}", whole, on_x=True))
    title, note = "What less memory costs", "Left is less memory, down is faster."
    if single:
        return Points(title, MEMORY, TIME, single, tuple(curves), tuple(marks), note)
    return Lines(title, MEMORY, TIME, tuple(curves), tuple(marks), note)


def share_up(share: float) -> str:
    """Return a share in percent, rounded up, so that it suffices as a budget."""
    return percent(_up(share), 1)


def _up(share: float) -> float:
    return ceil(1000 * share) / 1000


def _sentence(sweep: Sweep) -> str:
    """Return a sentence: how far memory goes down at which cost, and how far before it costs much."""
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
        text += (
            f"; within {format_bytes(cheap[-1].budget_bytes)} ({share_up(cheap[-1].budget_bytes / unmanaged)}) at most "
            "5 % longer"
        )
    return text


def sweep_table(sweep: Sweep) -> Table:
    """Return a table of every plan, the largest budget first."""
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
    """Return the row as a table shows it: a sufficient share, empty cells for missing values, and words."""
    return {
        "chosen": ", ".join(f"{name} {value}" for name, value in row["chosen"].items()),
        "budget_share": _up(row["budget_share"]),
        "offloaded_bytes": row["offloaded_bytes"] or None,
        "recomputed": recomputed(row["recomputed_flops"], row["recomputed_ops"]),
    }
