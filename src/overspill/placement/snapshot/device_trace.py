"""One device's trace, prepared for replay."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import SEGMENT_ACTIONS

from .read import DEFAULT_POOL, Segment, Snapshot, TraceEntry

LOSSES = ("segment_free", "segment_unmap")
_MARKS = ("free_requested", "snapshot")
_KNOWN = (*SEGMENT_ACTIONS, *_MARKS, "alloc", "free_completed", "oom")


@dataclass(frozen=True)
class DeviceTrace:
    """One device's trace, with streams numbered by their handles."""

    trace: tuple[TraceEntry, ...]
    segments: tuple[Segment, ...]
    left_out: int
    """The number of events of private pools."""
    notes: tuple[str, ...]
    """What cannot be known."""

    @property
    def first(self) -> int:
        """The first event to replay.

        An allocation at the very front may have begun before, and is taken as done.
        """
        return int(bool(self.trace) and self.trace[0].action == "alloc")


def device_trace(snapshot: Snapshot, device: int) -> DeviceTrace:
    """Return events and final segments of `device`, without private pools. Raises RequestError if it has no events."""
    trace, segments = snapshot.trace(device), snapshot.segments_of(device)
    if not trace:
        having = ", ".join(map(str, snapshot.devices))
        known = (
            f"devices with events: {having}" if having else "torch.cuda.memory._record_memory_history() records them"
        )
        raise RequestError(f"the snapshot holds no events of device {device}; {known}")
    # Private pools by the event's pool, or in older snapshots by its address.
    private = sorted((s.address, s.address + s.nbytes) for s in segments if s.pool != DEFAULT_POOL)
    starts = [start for start, _ in private]

    def is_private(entry: TraceEntry) -> bool:
        if entry.pool is not None:
            return entry.pool != DEFAULT_POOL
        at = bisect_right(starts, entry.address) - 1
        return at >= 0 and entry.address < private[at][1]

    # Note what is left out.
    kept = [entry for entry in trace if not is_private(entry)]
    notes = []
    if len(kept) < len(trace):
        notes.append(f"{len(trace) - len(kept)} events of graphs' private pools and of MemPools are left out")
    unknown = sorted({entry.action[:40] for entry in kept} - set(_KNOWN))
    if unknown:
        notes.append(f"events of kinds unknown here are left out: {', '.join(unknown)[:200]}")
    kept = [entry for entry in kept if entry.action in _KNOWN]
    if not any(entry.action not in _MARKS for entry in kept):
        why = "; ".join(notes) or f"they are {' and '.join(sorted({entry.action for entry in kept}))}"
        raise RequestError(
            f"none of the {len(trace)} events of device {device} can be replayed: {why}; record a run that allocates "
            "memory, outside "
            "of graphs and MemPools, with PyTorch 2.0 or later"
        )
    public = tuple(segment for segment in segments if segment.pool == DEFAULT_POOL)
    return DeviceTrace(tuple(kept), public, len(trace) - len(kept), tuple(notes))


def stream_numbers(recording: DeviceTrace) -> dict[int, int]:
    """Return a number for each stream, from 0 in the order of the handles, by which the allocator sorts streams."""
    handles = {entry.stream for entry in recording.trace} | {segment.stream for segment in recording.segments}
    return {handle: number for number, handle in enumerate(sorted(handles))}
