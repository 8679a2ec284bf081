"""A recorded run as a Trace: blocks with their lifetimes in events."""

from __future__ import annotations

from typing import NamedTuple

from overspill.core import Block, Frame, Trace
from overspill.core.frames import FrameTable
from overspill.placement.allocators.caching import MIN_BLOCK_BYTES

from .device_trace import device_trace, stream_numbers
from .read import Snapshot, TraceEntry
from .settings import config_of
from .start import live_at, start_of

Open = tuple[int, int, int, str, int, int]
"""A block not yet freed: start, requested bytes, stream, name, address, frame."""


class RecordedTrace(NamedTuple):
    """The blocks of `trace_of` with addresses and the lines that allocated them."""

    trace: Trace
    addresses: tuple[int, ...]
    made_by: tuple[int, ...]
    """Positions among `frames`; -1: unknown."""
    frames: tuple[Frame, ...]


def trace_of(snapshot: Snapshot, device: int | None = None) -> Trace:
    """Return the blocks of `device` as a Trace; positions are recorded events, from 1.

    `device` None: the first that has events. Blocks live at the start are live from 0, those live in the end until
    after the last event. Sizes and addresses are multiples of 512 bytes, as PyTorch's allocator promises its callers. A
    block is named after the line of Python that allocated it. Allocations that ran out of memory are left out. Raises
    RequestError if the snapshot has no events of the device, or if they do not belong to its segments.
    """
    return recorded_blocks(snapshot, device).trace


def recorded_blocks(snapshot: Snapshot, device: int | None = None) -> RecordedTrace:
    """Return the blocks of `trace_of` with addresses and lines. Raises RequestError as that does."""
    device = next(iter(snapshot.devices), 0) if device is None else device
    recording = device_trace(snapshot, device)
    numbers = stream_numbers(recording)
    events = recording.trace[recording.first :]
    start, _ = start_of(recording, config_of(snapshot)[0])
    # Blocks live at the start, then one for each allocation.
    live: dict[int, Open] = {at: (0, nbytes, numbers[stream], "", at, -1) for at, nbytes, stream in live_at(start)}
    closed: list[tuple[Open, int]] = []
    lines = _AllocatingLines()
    for position, entry in enumerate(events, start=1):
        if entry.action == "alloc":
            at = entry.address
            live[at] = (position, entry.nbytes, numbers[entry.stream], entry.place, at, lines.of(entry))
        elif entry.action == "free_completed":
            closed.append((live.pop(entry.address), position))
    # What is never freed lives to the end.
    closed += ((block, len(events) + 1) for block in live.values())
    closed.sort()
    trace = Trace(tuple(_block(i, *lived) for i, lived in enumerate(closed)))
    return RecordedTrace(trace, tuple(b[4] for b, _ in closed), tuple(b[5] for b, _ in closed), lines.table.found())


class _AllocatingLines:
    """Python lines that allocated blocks, one entry per stack."""

    def __init__(self) -> None:
        self.table = FrameTable()
        self._of: dict[int, int] = {}  # by the list of frames, which many entries share

    def of(self, entry: TraceEntry) -> int:
        """Return the innermost line; -1 if none was recorded."""
        found = self._of.get(id(entry.frames))
        if found is None:
            found = -1
            for file, line, function in entry.stack:
                found = self.table.number(Frame(file, line, function, found))
            self._of[id(entry.frames)] = found
        return found


def _block(number: int, block: Open, end: int) -> Block:
    start, nbytes, stream, name, _, _ = block
    size = max(-(-nbytes // MIN_BLOCK_BYTES), 1) * MIN_BLOCK_BYTES
    return Block(number, start, end, size, name, stream, alignment=MIN_BLOCK_BYTES)
