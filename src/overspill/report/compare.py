"""A comparison of policies, as JSON rows and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.core import Device
from overspill.core.units import format_bytes, format_seconds
from overspill.placement import CachingConfig, Events, replay
from overspill.plans.comparison import BASELINE, Row
from overspill.plans.plan import Plan
from overspill.policies.in_core import InCore
from overspill.simulate import trace_of

from .listing import percent, recomputed, whole_columns, yes
from .plan import peak_of, peak_rows

FIGURES = (
    "max_bytes", "average_bytes", "offloaded_bytes", "prefetched_bytes", "recomputed_flops", "recomputed_ops",
    "step_seconds", "slowdown", "compute_seconds", "overlapped_seconds", "exposed_transfer_seconds", "stall_seconds",
    "stall_cause", "fragmentation", "reserved_bytes", "device_bytes", "library_bytes", "allocator_fits", "expandable_fits", "peak_op", "peak_tensors", "plan_seconds",
)  # fmt: skip
"""What a row has of a plan; null where there is none."""


@dataclass(frozen=True)
class Reserved:
    """Memory that PyTorch's caching allocator reserves for a schedule.

    `fragmentation` is the share that no live byte needs. Where the device is too small for the allocator, the figures
    are those of an unlimited one, and `expandable_fits` says whether the device does with `expandable_segments:True`,
    which moves no block but needs no segment in one piece.
    """

    reserved_bytes: int
    fragmentation: float
    fits: bool
    expandable_fits: bool


def reserved_by_pytorch(plan: Plan, capacity_bytes: int) -> Reserved:
    """Bytes that PyTorch's caching allocator reserves for `plan`.

    The device has `capacity_bytes`.
    """
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
    """Bytes that PyTorch's caching allocator reserves on `device`.

    Where the card that it needs is known, over the first steps and with what libraries keep.
    """
    if plan.reserved_bytes is None or plan.device_bytes is None:
        return reserved_by_pytorch(plan, device.usable_bytes)
    fits = plan.device_bytes <= device.memory_bytes
    expandable_fits = fits or reserved_by_pytorch(plan, device.usable_bytes).expandable_fits
    return Reserved(plan.reserved_bytes, 1 - plan.peak_bytes / plan.reserved_bytes, fits, expandable_fits)


def row_figures(row: Row, device: Device) -> dict[str, Any]:
    """The JSON object of one policy's row on `device`."""
    head = {"policy": row.policy, "fits": row.fits, "error": row.error, "floor_bytes": row.floor_bytes}
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
        "device_bytes": plan.device_bytes,
        "library_bytes": plan.library_bytes,
        "allocator_fits": place.fits,
        "expandable_fits": place.expandable_fits,
        "peak_op": peak.at,
        "peak_tensors": peak_rows(plan.graph, peak),
        "plan_seconds": plan.plan_seconds,
    }
    return head | {name: figures[name] for name in FIGURES}


def compare_report(
    rows: Sequence[Mapping[str, Any]],
    device: Device,
    budget_bytes: int,
    lower_bound_seconds: float | None,
    title: str,
    note: str | None = None,
) -> RenderableType:
    """The table of `rows`, and notes for its reader.

    Each row is as `row_figures` gives it.
    """
    explained = explanation(rows, device, budget_bytes, lower_bound_seconds)
    parts: list[RenderableType] = [Text(title), "", _table(rows), "", Text(" ".join(explained))]
    if besides := remarks(rows, device):
        parts += ["", *map(Text, besides)]
    return Group(*parts, *([Text(note)] if note else []))


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    has_card = any(row["device_bytes"] is not None for row in rows)
    columns = (
        *("policy", "fits", *(["card", "live"] if has_card else ["max"]), "step", "slowdown", "average", "offloaded"),
        *("recomputed", "overlap", "exposed", "fragm."),
    )
    cells = [_cells(row, len(columns), has_card=has_card) for row in rows]
    return whole_columns(columns, cells, numbers=range(2, len(columns)))


def _cells(row: Mapping[str, Any], count: int, *, has_card: bool) -> tuple[str, ...]:
    fits = yes(row["fits"]) or "no"
    if row["max_bytes"] is None:
        # A policy without a plan has only the least that it needs.
        least = "" if row["floor_bytes"] is None else f"({format_bytes(row['floor_bytes'])})"
        return row["policy"], fits, least, *("",) * (count - 3)
    return (
        row["policy"],
        fits,
        *([format_bytes(row["device_bytes"])] if has_card else []),
        format_bytes(row["max_bytes"]),
        format_seconds(row["step_seconds"]),
        f"{row['slowdown']:.3f}",
        format_bytes(row["average_bytes"]),
        format_bytes(row["offloaded_bytes"]) if row["offloaded_bytes"] else "",
        recomputed(row["recomputed_flops"], row["recomputed_ops"]),
        format_seconds(row["overlapped_seconds"]) if row["overlapped_seconds"] else "",
        format_seconds(row["exposed_transfer_seconds"]) if row["exposed_transfer_seconds"] else "",
        percent(row["fragmentation"], 1) if row["allocator_fits"] or not row["fits"] else "no room",
    )


def explanation(
    rows: Sequence[Mapping[str, Any]], device: Device, budget_bytes: int, lower_bound_seconds: float | None
) -> list[str]:
    """What the figures mean, and the lower bound: a sentence each."""
    budget = format_bytes(budget_bytes)
    library_bytes = max((row["library_bytes"] or 0 for row in rows), default=0)
    found = [
        f"Times are simulated for {device.name}, not measured; slowdown is to {BASELINE}.",
        f"What fits stays within {budget}, the fastest first.",
        "Fragmentation is the share of what PyTorch's caching allocator would reserve that no tensor needs.",
    ]
    # Notes that apply to some rows only.
    if device.index is not None:
        found.append(
            "Card is what the GPU must have, its context and what libraries keep included, and live what tensors take of it."
        )
    if any(row["max_bytes"] is None and row["floor_bytes"] is not None for row in rows):
        found.append("In parentheses: the least that a policy without a plan would need.")
    if any(row["policy"] == InCore.name for row in rows):
        found.append(
            f"{InCore.name} keeps every feature map to the end of backward; PyTorch frees them as liveness does."
        )
    if library_bytes:
        found.append(
            f"cuBLAS keeps {format_bytes(library_bytes)} beside live bytes, which `overspill estimate` counts."
        )
    if lower_bound_seconds is not None:
        found.append(f"Lower bound by relaxation within {budget}: {format_seconds(lower_bound_seconds)}.")
    return found


def remarks(rows: Sequence[Mapping[str, Any]], device: Device) -> list[str]:
    """Notes on allocators out of memory and policies without a plan."""
    found = []
    crowded = [row for row in rows if row["fits"] and not row["allocator_fits"]]
    for expandable, verdict in ((True, "does not"), (False, "does too")):
        names = [row["policy"] for row in crowded if row["expandable_fits"] is expandable]
        if names:
            found.append(
                f"PyTorch's caching allocator runs out of memory on {device.name} under {', '.join(names)}; "
                f"with expandable_segments:True it {verdict}."
            )
    return found + [f"{row['policy']}: {row['error']}" for row in rows if row["error"] is not None]
