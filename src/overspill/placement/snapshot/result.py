"""The result of comparing a snapshot with its replay."""

from __future__ import annotations

from dataclasses import dataclass

from overspill.placement.allocators.caching_config import CachingConfig


@dataclass(frozen=True)
class SnapshotReplay:
    """How the simulated allocator compares with a recorded trace.

    `segment_events_equal`: the same exchanges of memory with the device, in action, size, stream and order.
    `placements_equal`: every block at the recorded address as well. `final_blocks_equal`: the same live and free blocks
    in the end. `difference` is the first difference, in one line; replay ends (`compared` of `events` events are done)
    where the exchanges differ. `least_capacity_bytes` is the memory that the device had at least,
    `capacity_above_bytes` less than that (None: it never ran out). Peaks are simulated, and count what was live at the
    start.
    """

    device: int
    config: CachingConfig
    events: int
    compared: int
    left_out: int
    allocations: int
    frees: int
    out_of_memory: int
    segment_events: int
    cache_releases: int
    retries: int
    live_at_start: int
    reserved_at_start_bytes: int
    segment_events_equal: bool
    placements_equal: bool
    final_blocks_equal: bool
    misplaced: int
    difference: str | None
    least_capacity_bytes: int
    capacity_above_bytes: int | None
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.segment_events_equal and self.placements_equal and self.final_blocks_equal
