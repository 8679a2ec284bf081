"""A replayed snapshot in a terminal: where the simulation agrees."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes
from overspill.placement.simulated_device import PAGE_BYTES
from overspill.placement.snapshot import SnapshotReplay
from overspill.placement.snapshot.settings import text_of

from .listing import listing


def snapshot_report(
    found: SnapshotReplay, name: str, devices: Sequence[int], saved: str | None = None
) -> RenderableType:
    """A table of what was replayed, and whether the simulated allocator agreed."""
    rows = [
        ("events", f"{found.compared} of {found.events} replayed: {_what(found)}"),
        ("live at the start", f"{found.live_at_start} blocks, {format_bytes(found.reserved_at_start_bytes)} reserved"),
        ("settings", text_of(found.config) or "the defaults"),
        ("segment events", f"{found.segment_events} compared: {_verdict(equal=found.segment_events_equal)}"),
        ("placements", f"{found.allocations} blocks compared: {_placements(found)}"),
        ("blocks in the end", _verdict(equal=found.final_blocks_equal)),
        ("peak requested, simulated", format_bytes(found.peak_requested_bytes)),
        ("peak allocated, simulated", format_bytes(found.peak_allocated_bytes)),
        ("peak reserved, simulated", format_bytes(found.peak_reserved_bytes)),
        ("memory of the device", _capacity(found)),
    ]
    lines = [Text(f"note: {note}") for note in found.notes]
    # Other devices in the same snapshot.
    others = [str(device) for device in devices if device != found.device]
    if others:
        lines.append(Text(f"note: the snapshot has events of device {', '.join(others)} too; --device chooses"))
    if saved:
        lines.append(Text(saved))
    return Group(listing((f"replay of device {found.device}", name), rows), *([Text(""), *lines] if lines else []))


def _what(found: SnapshotReplay) -> str:
    parts = [f"{found.allocations} allocations", f"{found.frees} frees"]
    if found.retries:
        parts.append(f"{found.retries} with the cache given back to make room")
    if found.out_of_memory:
        parts.append(f"{found.out_of_memory} out of memory")
    if found.cache_releases:
        parts.append(f"the cache emptied {found.cache_releases} times")
    return ", ".join(parts)


def _verdict(*, equal: bool) -> str:
    return "equal" if equal else "different"


def _placements(found: SnapshotReplay) -> str:
    if found.placements_equal:
        return "equal"
    return f"{found.misplaced} differ" if found.misplaced else "equal until the segment events differ"


def _capacity(found: SnapshotReplay) -> str:
    """Bounds on the device's memory that follow from the recording."""
    least = f"at least {format_bytes(found.least_capacity_bytes)}"
    above = found.capacity_above_bytes
    if above is not None and above - found.least_capacity_bytes <= PAGE_BYTES:
        return f"{format_bytes(found.least_capacity_bytes)} for PyTorch"
    return least if above is None else f"{least}, less than {format_bytes(above)}, for PyTorch"
