"""A replayed snapshot as a page: verdict, what was compared, and the recorded layout."""

from __future__ import annotations

from dataclasses import replace

from overspill.core import Layout, Trace
from overspill.core.units import format_bytes
from overspill.placement.simulated_device import PAGE_BYTES
from overspill.placement.snapshot import Otherwise, Snapshot, SnapshotReplay
from overspill.placement.snapshot.settings import text_of
from overspill.placement.snapshot.trace import recorded_blocks
from overspill.report.tables import Unit

from .page import Column, Figure, Page, PasteLine, Step, Table, Verdict
from .page.step import addresses

LEAST_HOLE_BYTES = 64 << 20
"""Unused address space of at least this size is left out of the map, since segments are far apart."""


def snapshot_page(found: SnapshotReplay, snapshot: Snapshot, title: str, others: Otherwise) -> Page:
    """Return the page of `found`, the replay of `snapshot`, and of what `others` would hold."""
    devices = [str(device) for device in snapshot.devices if device != found.device]
    also = f"The snapshot has events of device {', '.join(devices)} too; --device chooses."
    return Page(
        title,
        _verdict(found),
        (lambda: (_views(found, snapshot),), _compared(found), _otherwise(others)),
        ("Peaks are simulated.", *found.notes, *([also] if devices else [])),
        (PasteLine("overspill run --allocator planned train.py", "Your script with planned addresses:"),),
    )


def _verdict(found: SnapshotReplay) -> Verdict:
    text = f"The simulated allocator does otherwise than the recorded one: {found.difference}"
    if found.equal:
        text = "The simulated allocator did what the recorded one did"
    figures = (
        Figure("peak requested", format_bytes(found.peak_requested_bytes), "simulated"),
        Figure("peak allocated", format_bytes(found.peak_allocated_bytes), "simulated"),
        Figure("peak reserved", format_bytes(found.peak_reserved_bytes), "simulated"),
        Figure("memory of the device", _capacity(found)),
        Figure("settings", text_of(found.config) or "the defaults"),
    )
    return Verdict(text, found.equal, figures)


def _compared(found: SnapshotReplay) -> Table:
    """Return the table of the replayed parts, and how far each equals the recording."""
    rows = (
        ("events", f"{found.compared} of {found.events} replayed: {_what(found)}"),
        ("live at the start", f"{found.live_at_start} blocks, {format_bytes(found.reserved_at_start_bytes)} reserved"),
        ("segment events", f"{found.segment_events} compared: {_equal(found.segment_events_equal)}"),
        ("placements", f"{found.allocations} blocks compared: {_placements(found)}"),
        ("blocks in the end", _equal(found.final_blocks_equal)),
    )
    return Table(f"Replay of device {found.device}", (Column("what"), Column("found")), rows)


def _otherwise(others: Otherwise) -> Table:
    """Return what other allocators would hold of the device."""
    note = (
        "No plan came into force: that takes two recorded steps of the same sizes, and a third."
        " Peaks are of all events."
    )
    if others.since is not None:
        share = others.planned_requests / max(1, others.requests)
        note = (
            f"Peaks from event {others.since} of {others.events} on: plans are in force from there."
            f" {share:.1%} of all {others.requests} requests got a planned address."
        )
    rows = (
        ("recorded settings", others.recorded_bytes),
        ("expandable_segments:True", others.expandable_bytes),
        ("planned", others.planned_bytes),
        ("chunked", others.chunked_bytes),
        ("gtbm", others.gtbm_bytes),
    )
    columns = (Column("allocator"), Column("reserved", Unit.BYTES, bar=True), Column("beyond requests", Unit.SHARE))
    requested = others.requested_bytes
    cells = tuple((name, nbytes, nbytes / requested - 1 if requested else 0.0) for name, nbytes in rows)
    return Table("Reserved otherwise, simulated", columns, cells, note)


def _views(found: SnapshotReplay, snapshot: Snapshot) -> Step:
    """Return the blocks over time, at their recorded addresses."""
    trace, addressed, made_by, frames = recorded_blocks(snapshot, found.device)
    offsets = _closed_up(trace, addressed)
    peak = max((o + block.nbytes for o, block in zip(offsets, trace.blocks, strict=True) if block.pieces), default=0)
    layout = Layout("recorded", offsets, peak, trace.lower_bound_bytes)
    title = "Recorded addresses over time"
    made = addresses(trace, layout, title, frames=frames, made_by=made_by, position="event")
    holes = "Positions are the recording's events; holes of 64 MiB and more are left out of the addresses."
    return replace(made, note=holes)


def _closed_up(trace: Trace, addressed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the addresses from 0 on, without large holes between segments."""
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


def _what(found: SnapshotReplay) -> str:
    parts = [f"{found.allocations} allocations", f"{found.frees} frees"]
    if found.retries:
        parts.append(f"{found.retries} after the cache was given back")
    if found.out_of_memory:
        parts.append(f"{found.out_of_memory} out of memory")
    if found.cache_releases:
        parts.append(f"the cache emptied {found.cache_releases} times")
    return ", ".join(parts)


def _equal(equal: bool) -> str:
    return "equal" if equal else "different"


def _placements(found: SnapshotReplay) -> str:
    if found.placements_equal:
        return "equal"
    return f"{found.misplaced} differ" if found.misplaced else "equal until the segment events differ"


def _capacity(found: SnapshotReplay) -> str:
    """Return the bounds on the device's memory that follow from the recording."""
    least = f"at least {format_bytes(found.least_capacity_bytes)}"
    above = found.capacity_above_bytes
    if above is not None and above - found.least_capacity_bytes <= PAGE_BYTES:
        return f"{format_bytes(found.least_capacity_bytes)} for PyTorch"
    return least if above is None else f"{least}, less than {format_bytes(above)}, for PyTorch"
