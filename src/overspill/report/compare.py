"""A comparison of policies: JSON rows, and the page of memory against time with the table of all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.core import Device
from overspill.core.units import format_apart, format_bytes, format_seconds
from overspill.placement import CachingConfig, Events, replay
from overspill.placement.allocators.caching import CachingAllocator
from overspill.plans.comparison import BASELINE, Comparison, Row
from overspill.plans.plan import Plan
from overspill.policies.in_core import InCore
from overspill.simulate import trace_of

from .listing import percent, recomputed
from .page import Axis, Column, Curve, Figure, Mark, Page, Point, Points, Table, Unit, Verdict
from .placements import Crossing, placement_tables
from .plan import peak_of, peak_rows, pool_notes

FIGURES = (
    "max_bytes", "average_bytes", "offloaded_bytes", "prefetched_bytes", "recomputed_flops", "recomputed_ops",
    "step_seconds", "slowdown", "compute_seconds", "overlapped_seconds", "exposed_transfer_seconds", "stall_seconds",
    "stall_cause", "fragmentation", "reserved_bytes", "device_bytes", "library_bytes", "allocator_fits",
    "expandable_fits", "peak_op", "peak_tensors", "plan_seconds", "model_on_host",
)  # fmt: skip
"""The plan's figures in a row; null without a plan."""
COLUMNS = {
    "policy": Column("policy"),
    "pool": Column("pool"),
    "fits": Column("fits"),
    "device_bytes": Column("card", Unit.BYTES, bar=True),
    "max_bytes": Column("live", Unit.BYTES, bar=True),
    "floor_bytes": Column("needs at least", Unit.BYTES, short="least"),
    "over_bytes": Column("over the budget", Unit.BYTES, short="over"),
    "step_seconds": Column("simulated step", Unit.SECONDS, short="step"),
    "slowdown": Column("slowdown", Unit.RATIO),
    "average_bytes": Column("average", Unit.BYTES),
    "offloaded_bytes": Column("offloaded", Unit.BYTES),
    "recomputed": Column("recomputed", Unit.NUMBER),
    "overlapped_seconds": Column("overlap", Unit.SECONDS),
    "exposed_transfer_seconds": Column("exposed", Unit.SECONDS),
    "fragmentation": Column("fragmentation", Unit.SHARE, short="fragm."),
}


CROWDED = "no: pool"
"""The word for a row whose live tensors would fit."""
PYTORCHS = "PyTorch's caching allocator"
TIME = Axis("simulated step", Unit.SECONDS)
EXPLAINED = (
    "Average is what is live over the time of the step, in the mean. Overlap is the time in which ops ran while "
    "something was "
    "moved; exposed is the time in which ops waited, for what was moved or for the host."
)


@dataclass(frozen=True)
class Reserved:
    """Memory that PyTorch's caching allocator reserves for a schedule.

    On a device that is too small for the allocator, the figures are those of an unlimited device.
    """

    reserved_bytes: int
    fragmentation: float
    """The share of the reserved bytes that no live byte needs."""
    fits: bool
    expandable_fits: bool
    """Whether `expandable_segments:True` makes it fit: no block moves, but no segment has to be contiguous."""


def reserved_by_pytorch(plan: Plan, capacity_bytes: int) -> Reserved:
    """Return the bytes that PyTorch's caching allocator reserves for `plan` on a device of `capacity_bytes`."""
    trace = trace_of(plan.graph, plan.schedule)
    events = Events.of(trace)
    done = replay(events, capacity_bytes=capacity_bytes)
    fits = expandable_fits = done.fits
    if not fits:
        expandable = CachingConfig(expandable_segments=True)
        expandable_fits = replay(events, capacity_bytes=capacity_bytes, config=expandable).fits
        done = replay(events)
    reserved = done.peak_reserved_bytes
    return Reserved(reserved, 1 - trace.lower_bound_bytes / reserved if reserved else 0.0, fits, expandable_fits)


def reserved_on(plan: Plan, device: Device) -> Reserved:
    """Return the bytes that PyTorch's caching allocator reserves on `device`.

    Where the size of GPU that it needs is known, they cover the first steps and what libraries keep.
    """
    if plan.reserved_bytes is None:
        return reserved_by_pytorch(plan, device.usable_bytes)
    fits = plan.needed_bytes <= (device.usable_bytes if plan.device_bytes is None else device.memory_bytes)
    expandable_fits = fits or reserved_by_pytorch(plan, device.usable_bytes).expandable_fits
    return Reserved(plan.reserved_bytes, 1 - plan.peak_bytes / plan.reserved_bytes, fits, expandable_fits)


def row_figures(row: Row, device: Device) -> dict[str, Any]:
    """Return the JSON object of one policy's row on `device`."""
    head = {
        "policy": row.policy, "fits": row.fits, "error": row.error, "floor_bytes": row.floor_bytes, "pool": row.pool,
        "crowded": row.crowded, "chosen": row.chosen, "note": row.note,
    }  # fmt: skip
    plan = row.plan
    if plan is None:
        return head | dict.fromkeys(FIGURES)
    # All figures that the JSON has of a plan.
    timeline, place, peak = plan.timeline, reserved_on(plan, device), peak_of(plan)
    figures = {
        "max_bytes": plan.peak_bytes,
        "average_bytes": round(timeline.average_bytes),
        "offloaded_bytes": plan.offloaded_bytes,
        "prefetched_bytes": plan.prefetched_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "recomputed_ops": plan.recomputed_ops,
        "step_seconds": plan.step_seconds,
        "slowdown": row.slowdown,
        "compute_seconds": timeline.compute_seconds,
        "overlapped_seconds": float(timeline.overlapped_seconds),
        "exposed_transfer_seconds": timeline.exposed_transfer_seconds,
        "stall_seconds": row.stall_seconds,
        "stall_cause": row.stall_cause,
        "fragmentation": place.fragmentation,
        "reserved_bytes": place.reserved_bytes,
        "device_bytes": plan.reserved_bytes if plan.device_bytes is None else plan.device_bytes,
        "library_bytes": plan.library_bytes,
        "allocator_fits": place.fits,
        "expandable_fits": place.expandable_fits,
        "peak_op": peak.at,
        "peak_tensors": peak_rows(plan.graph, peak),
        "plan_seconds": plan.plan_seconds,
        "model_on_host": plan.model_on_host,
    }
    return head | {name: figures[name] for name in FIGURES}


def compare_page(
    compared: Comparison,
    title: str | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
    crossings: Sequence[Crossing] = (),
) -> Page:
    """Return the page of `compared`, whose rows have the form that `row_figures` returns.

    With `crossings`, the page also has the result of each allocator or solver for every plan.
    """
    rows = [row_figures(row, compared.device) for row in compared] if rows is None else rows
    over = [dict(found) | {"over_bytes": _over(row, compared)} for row, found in zip(compared, rows, strict=True)]
    notes = explanation(rows, compared.device, compared.budget_bytes, compared.lower_bound_seconds)
    if any(row["average_bytes"] is not None for row in rows):
        notes.append(EXPLAINED)
    return Page(
        title or f"policies within {format_bytes(compared.budget_bytes)} on {compared.device.name}",
        compare_verdict(compared),
        (lambda: (_points(compared),), compare_table(over), *placement_tables(crossings)),
        (*notes, *remarks(rows, compared.device)),
    )


def _over(row: Row, compared: Comparison) -> int | None:
    """Return the bytes by which a policy's need exceeds the budget."""
    least = row.least_bytes
    return None if row.fits or least is None or least <= compared.budget_bytes else least - compared.budget_bytes


def compare_verdict(compared: Comparison) -> Verdict:
    """Return the fastest policy that fits, or the least memory that would suffice."""
    budget = format_bytes(compared.budget_bytes)
    fitting = [row for row in compared if row.fits and row.plan is not None]
    if not fitting or fitting[0].plan is None:
        # No policy fits: name the least that would do.
        least = min((row.least_bytes for row in compared if row.least_bytes is not None), default=None)
        if least is None:
            return Verdict(f"No policy fits {budget}", good=False)
        budget, needs = format_apart(compared.budget_bytes, least)
        return Verdict(f"No policy fits {budget}; {needs} would do", good=False)
    best, plan = fitting[0], fitting[0].plan
    # The fastest, and how far it is from the bound.
    figures = [
        Figure("policies that fit", f"{len(fitting)} of {len(compared)}"),
        Figure("card" if plan.device_bytes else "memory", format_bytes(plan.needed_bytes), f"of {budget}"),
        Figure("simulated step", format_seconds(plan.step_seconds), f"{best.slowdown:.3f} of {BASELINE}'s"),
        Figure("offloaded each step", format_bytes(plan.offloaded_bytes)),
    ]
    if compared.lower_bound_seconds:
        above = plan.step_seconds / compared.lower_bound_seconds - 1
        figures.append(
            Figure(
                "proven lower bound",
                format_seconds(compared.lower_bound_seconds),
                f"the plan is {percent(above, 1)} above it",
            )
        )
    return Verdict(f"{best.policy} is the fastest within {budget}", good=True, figures=tuple(figures))


def _points(compared: Comparison) -> Points:
    planned = [(row, row.plan) for row in compared if row.plan is not None]
    points = tuple(
        Point(row.policy, plan.needed_bytes, plan.step_seconds, row.fits, _note(row)) for row, plan in planned
    )
    budget, of_card = compared.budget_bytes, any(plan.device_bytes for _, plan in planned)
    most = max((plan.needed_bytes for _, plan in planned), default=budget)
    marks = (Mark("budget", budget, on_x=True),) if budget <= 2 * most else ()
    bounds = compared.bounds()
    curves = (bound_curve(dict(bounds)),) if bounds else ()
    memory = Axis("card" if of_card else "memory", Unit.BYTES)
    return Points("Memory against time", memory, TIME, points, curves, marks, "Left is less memory, down is faster.")


def bound_curve(bounds: Mapping[int, float]) -> Curve:
    """Return the curve of seconds that no plan beats, by budget.

    A bound proven for one budget holds for all smaller budgets, down to the next proven one.
    """
    budgets = sorted(bounds, reverse=True)
    return Curve("proven lower bound", budgets, [bounds[budget] for budget in budgets], steps=True, dashed=True)


def _note(row: Row) -> str:
    """Return the tooltip of a policy."""
    waits = "" if row.stall_cause is None else f"; waits longest for {row.stall_cause}"
    return f"slowdown {row.slowdown:.3f}{waits}"


def compare_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return all figures of `rows`, each in the form that `row_figures` returns.

    Columns that are empty in every row are left out.
    """
    shown = [row | _shown(row) for row in map(dict, rows)]
    if not _pools(shown):  # what is the same in all rows has no column
        shown = [row | {"pool": None} for row in shown]
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in shown)]
    cells = tuple(tuple(map(row.get, keys)) for row in shown)
    return Table("All figures", tuple(COLUMNS[key] for key in keys), cells)


def _pools(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a pool other than the default places any row's blocks."""
    return not {row["pool"] for row in rows} <= {None, CachingAllocator.name}


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row as a table shows it: empty cells for missing values, and words."""
    head = {"fits": CROWDED if row["crowded"] else row["fits"]}
    if row["max_bytes"] is None:
        return head
    crowded = row["fits"] and not row["allocator_fits"]
    moved = {key: row[key] or None for key in ("offloaded_bytes", "overlapped_seconds", "exposed_transfer_seconds")}
    return head | moved | {
        "recomputed": recomputed(row["recomputed_flops"], row["recomputed_ops"]),
        "fragmentation": "out of memory" if crowded else row["fragmentation"],
    }  # fmt: skip


def explanation(
    rows: Sequence[Mapping[str, Any]], device: Device, budget_bytes: int, lower_bound_seconds: float | None
) -> list[str]:
    """Return the meaning of the figures, and the lower bound: a sentence each."""
    budget = format_bytes(budget_bytes)
    library_bytes = max((row["library_bytes"] or 0 for row in rows), default=0)
    found = [
        f"Times are simulated for {device.name}, not measured; slowdown is to {BASELINE}.",
        f"What fits stays within {budget}, the fastest first.",
        (
            f"Fragmentation is the share of what {'the pool' if _pools(rows) else PYTORCHS} would reserve that no "
            "tensor needs."
        ),
    ]
    # Notes that apply to some rows only.
    if pools := {row["pool"] for row in rows if row["crowded"]}:
        pool = " or ".join(sorted(pools)) if _pools(rows) else PYTORCHS
        found.append(f"`{CROWDED}`: live tensors would fit, and do not as {pool} places them.")
    found += pool_notes(row["pool"] for row in rows)
    if device.index is not None:
        found.append(
            "Card is what the GPU must have, its context and what libraries keep included, and live what tensors take "
            "of it."
        )
    if any(row["policy"] == InCore.name for row in rows):
        found.append(
            f"{InCore.name} keeps every feature map to the end of backward; PyTorch frees them as liveness does."
        )
    if library_bytes:
        found.append(
            f"cuBLAS keeps {format_bytes(library_bytes)} next to live bytes, which `overspill estimate` counts."
        )
    if lower_bound_seconds is not None:
        found.append(f"Lower bound by relaxation within {budget}: {format_seconds(lower_bound_seconds)}.")
    return found


def remarks(rows: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    """Return notes on allocators out of memory and policies without a plan."""
    found = []
    crowded = [row for row in rows if row["fits"] and not row["allocator_fits"]]
    for expandable, verdict in ((True, "does not"), (False, "does too")):
        names = [row["policy"] for row in crowded if row["expandable_fits"] is expandable]
        if names:
            found.append(
                f"PyTorch's caching allocator runs out of memory on {device.name} under {', '.join(names)}; "
                f"with expandable_segments:True it {verdict}."
            )
    on_host = [row["policy"] for row in rows if row["model_on_host"]]
    if on_host:
        found.append(f"The model does not fit on the card under {', '.join(on_host)}, and begins on the CPU.")
    chosen = [f"{row['policy']} {name} {value}" for row in rows for name, value in row["chosen"].items()]
    found += [f"Chosen by policies themselves: {', '.join(chosen)}."] if chosen else []
    found += [f"{row['policy']} {row['note']}." for row in rows if row["note"] is not None]
    return found + [f"{row['policy']}: {row['error']}" for row in rows if row["error"] is not None]
