"""The result of comparing a snapshot with its replay."""

from __future__ import annotations

from dataclasses import dataclass

from overspill.placement.allocators.caching_config import CachingConfig


@dataclass(frozen=True)
class SnapshotReplay:
    """How the simulated allocator compares with a recorded trace.

    Replay ends where the exchanges differ: `compared` of `events` events are done. Peaks are simulated, and include the
    blocks live at the start.
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
    """Whether the exchanges of memory with the device are equal, in action, size, stream and order."""
    placements_equal: bool
    """Whether every block is at the recorded address as well."""
    final_blocks_equal: bool
    """Whether the same blocks are live and free in the end."""
    misplaced: int
    difference: str | None
    """The first difference, in one line."""
    least_capacity_bytes: int
    """The device had at least this memory."""
    capacity_above_bytes: int | None
    """The device had less memory than this; None: it never ran out."""
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.segment_events_equal and self.placements_equal and self.final_blocks_equal
