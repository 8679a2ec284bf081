"""A replayed snapshot as a page: verdict and recorded layout."""

from __future__ import annotations

from overspill.core import Layout, Trace
from overspill.core.units import format_bytes
from overspill.placement.snapshot import Snapshot, SnapshotReplay
from overspill.placement.snapshot.trace import recorded_blocks
from overspill.report.page import Figure, Page, Verdict, addresses

LEAST_HOLE_BYTES = 64 << 20
"""Address space of this size in which no block ever lay is left out of the map: segments lie far apart."""


def snapshot_page(found: SnapshotReplay, snapshot: Snapshot, title: str) -> Page:
    """The report of `found`, the replay of `snapshot`."""
    trace, addressed, made_by, frames = recorded_blocks(snapshot, found.device)
    offsets = _closed_up(trace, addressed)
    peak = max((o + block.nbytes for o, block in zip(offsets, trace.blocks, strict=True) if block.pieces), default=0)
    layout = Layout("recorded", offsets, peak, trace.lower_bound_bytes)
    views = addresses(trace, layout, "Recorded addresses over time", frames=frames, made_by=made_by, position="event")
    notes = (
        "Blocks lie where the recording says. Positions are its events; holes of 64 MiB and more are left out of the addresses.",
        "Peaks are simulated.",
        *found.notes,
    )
    return Page(title, _verdict(found), (views,), notes)


def _verdict(found: SnapshotReplay) -> Verdict:
    text = f"The simulated allocator does otherwise than the recorded one: {found.difference}"
    if found.equal:
        text = "The simulated allocator did what the recorded one did"
    return Verdict(
        text,
        good=found.equal,
        figures=(
            Figure("events", str(found.events), f"{found.allocations} allocations, {found.frees} frees"),
            Figure("segment events", str(found.segment_events), "equal" if found.segment_events_equal else "different"),
            Figure("peak requested", format_bytes(found.peak_requested_bytes), "simulated"),
            Figure("peak allocated", format_bytes(found.peak_allocated_bytes), "simulated"),
            Figure("peak reserved", format_bytes(found.peak_reserved_bytes), "simulated"),
        ),
    )


def _closed_up(trace: Trace, addressed: tuple[int, ...]) -> tuple[int, ...]:
    """The addresses from 0 on, without large holes between segments."""
    order = sorted(range(len(addressed)), key=lambda i: addressed[i])
    found = [0] * len(addressed)
    shift, reached = (addressed[order[0]], addressed[order[0]]) if order else (0, 0)
    for position in order:
        hole = addressed[position] - reached
        if hole >= LEAST_HOLE_BYTES:
            shift += hole
        found[position] = addressed[position] - shift
        reached = max(reached, addressed[position] + trace.blocks[position].nbytes)
    return tuple(found)
