"""The allocator's state at the beginning of a trace.

It is derived from its end, which the snapshot holds, with all its events undone. A trace begins in the middle if
recording began late or if its ring buffer overflowed. Blocks live then are found by going back from the segments of the
snapshot. The size of a block is known from its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import SEGMENT_ACTIONS, BlockView, SegmentView
from overspill.placement.allocators.caching import SMALL_BYTES, SMALL_SEGMENT_BYTES, round_size
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.events import ALLOCATE, FREE, TRY, Events

from .device_trace import DeviceTrace, device_trace, stream_numbers
from .ranges import Ranges
from .read import Snapshot, TraceEntry

_MOST_SPANNED = 1 << 40
"""An expandable segment spans nine eighths of the device's memory; no device has that much."""


@dataclass(frozen=True)
class StartSegment:
    """A segment at the beginning of the trace.

    An expandable one has all ranges of its pool and stream.
    """

    view: SegmentView
    small: bool
    expandable: bool


@dataclass
class _Live:
    requested_bytes: int
    nbytes: int | None


def start_of(recording: DeviceTrace, config: CachingConfig) -> tuple[tuple[StartSegment, ...], int]:
    """Return segments before the first event to replay, and the number of blocks whose end is uncertain.

    Raises RequestError if trace and segments disagree.
    """
    state = _StartState(recording, config)
    for at in range(len(recording.trace) - 1, recording.first - 1, -1):
        state.undo(at, recording.trace[at])
    return state.segments(), state.unsure


def live_at(segments: Iterable[StartSegment]) -> list[tuple[int, int, int]]:
    """Return live blocks of `segments` as (address, requested bytes, stream), by address."""
    views = [segment.view for segment in segments]
    return sorted((b.address, b.requested_bytes, v.stream) for v in views for b in v.blocks if b.state == "live")


def events_of(snapshot: Snapshot, device: int, config: CachingConfig | None = None) -> Events:
    """Return the recorded allocations and frees of `device`, for any allocator.

    Blocks live at the start come first, then the trace. An allocation that ran out of memory is elastic: it may fail
    again.
    """
    recording = device_trace(snapshot, device)
    numbers = stream_numbers(recording)
    # First the blocks that are live at the start.
    rows: list[tuple[int, int, int, int]] = []
    blocks: dict[int, int] = {}
    for address, nbytes, stream in live_at(start_of(recording, config or CachingConfig())[0]):
        blocks[address] = len(rows)
        rows.append((ALLOCATE, len(rows), nbytes, numbers[stream]))
    count = len(rows)
    # Then the trace; blocks are numbered as they come.
    for entry in recording.trace[recording.first :]:
        if entry.action == "free_completed":
            rows.append((FREE, blocks.pop(entry.address), 0, numbers[entry.stream]))
        elif entry.action in ("alloc", "oom"):
            rows.append((ALLOCATE if entry.action == "alloc" else TRY, count, entry.nbytes, numbers[entry.stream]))
            if entry.action == "alloc":
                blocks[entry.address] = count
            else:
                rows.append((FREE, count, 0, numbers[entry.stream]))
            count += 1
    return Events.from_rows(rows)


class _StartState:
    """Memory held and blocks live, going back in time."""

    def __init__(self, recording: DeviceTrace, config: CachingConfig) -> None:
        self.unsure = 0
        self._config = config
        self._trace, self._first = recording.trace, recording.first
        self._plain: dict[int, tuple[int, int]] = {}
        self._expandable_memory: dict[int, Ranges] = {}
        self._live: dict[int, _Live] = {}
        self._evidence: list[tuple[int, bool]] = []
        # Begin with the final state that the snapshot holds.
        for segment in recording.segments:
            if segment.is_expandable:
                self._ranges(segment.stream).add(segment.address, segment.nbytes)
                self._evidence.append((segment.address, segment.kind == "small"))
            else:
                self._plain[segment.address] = (segment.nbytes, segment.stream)
            for address, block in segment.placed():
                if block.live:
                    self._live[address] = _Live(block.requested_bytes, block.nbytes)

    def undo(self, at: int, entry: TraceEntry) -> None:
        """Go back to before event `at`."""
        if entry.action in SEGMENT_ACTIONS:
            wrong = self._undo_exchange(entry)
        elif entry.action in ("alloc", "free_completed"):
            wrong = self._undo_block(entry)
        else:
            return
        if wrong:
            raise RequestError(
                f"the snapshot's events and segments do not belong together: after event {at} ({entry.action} of"
                f" {entry.nbytes} bytes at {entry.address:#x}) the allocator {wrong}; was recording stopped, or were"
                " events skipped, before the snapshot was taken?"
            )

    def _undo_block(self, entry: TraceEntry) -> str:
        """Undo an allocation or a free, and return an error text or ""."""
        size = round_size(entry.nbytes, self._config.roundup_power2_divisions)
        self._evidence.append((entry.address, size <= SMALL_BYTES))
        if entry.action == "free_completed":
            if entry.address in self._live:
                return "still has a live block there"
            self._live[entry.address] = _Live(entry.nbytes, None)
            return ""
        gone = self._live.pop(entry.address, None)
        if gone is None or gone.requested_bytes != entry.nbytes:
            return "has no live block of that size there"
        return ""

    def _undo_exchange(self, entry: TraceEntry) -> str:
        """Undo an exchange with the device, and return an error text or ""."""
        address, nbytes, plain = entry.address, entry.nbytes, (entry.nbytes, entry.stream)
        match entry.action:
            case "segment_alloc":
                return "" if self._plain.pop(address, None) == plain else "does not hold that segment"
            case "segment_free":
                return "" if self._plain.setdefault(address, plain) is plain else "still holds a segment there"
            case "segment_map":
                self._evidence.append((address, nbytes <= SMALL_SEGMENT_BYTES))
                return "" if self._ranges(entry.stream).remove(address, nbytes) else "does not hold that memory"
            case _:
                return "" if self._ranges(entry.stream).add(address, nbytes) else "still holds that memory"

    def segments(self) -> tuple[StartSegment, ...]:
        """Return the segments with their blocks, as far back as was undone."""
        addresses = sorted(self._live)
        self._find_ends(addresses)
        found = []
        for start, (nbytes, stream) in sorted(self._plain.items()):
            small = nbytes <= SMALL_SEGMENT_BYTES
            inside = _between(addresses, start, start + nbytes)
            blocks = self._blocks(start, start + nbytes, inside, slack=not small)
            found.append(StartSegment(SegmentView(start, nbytes, nbytes, stream, tuple(blocks)), small, False))
        # Expandable segments: all ranges of one stream and pool.
        for stream, ranges in sorted(self._expandable_memory.items()):
            for small in (True, False):
                own = [span for span in ranges.spans if self._small(span[0]) is small]
                if own:
                    found.append(self._expandable(own, stream, small, addresses))
        if len(addresses) != sum(b.state == "live" for segment in found for b in segment.view.blocks):
            raise RequestError(
                "the snapshot's blocks and segments do not belong together: a live block is in no segment"
            )
        return tuple(found)

    def _expandable(self, spans: list[tuple[int, int]], stream: int, small: bool, addresses: list[int]) -> StartSegment:
        """Return the expandable segment with the mapped ranges `spans`.

        Between them, and from its base on, nothing is mapped.
        """
        first = spans[0][0]
        base = min([first, *(a for a in self._mapped(stream, first) if self._small(a) is small)])
        # Unmapped space between the ranges.
        blocks: list[BlockView] = []
        end = base
        for start, stop in spans:
            if start > end:
                blocks.append(BlockView(end, start - end, 0, "unmapped"))
            blocks += self._blocks(start, stop, _between(addresses, start, stop), slack=False)
            end = stop
        mapped = sum(stop - start for start, stop in spans)
        return StartSegment(SegmentView(base, end - base, mapped, stream, tuple(blocks)), small, True)

    def _blocks(self, start: int, end: int, addresses: Sequence[int], *, slack: bool) -> list[BlockView]:
        """Return live blocks at `addresses` and the free ones between, from `start` to `end`."""
        blocks: list[BlockView] = []
        at = start
        for address, following in pairwise((*addresses, end)):
            if address > at:
                blocks.append(BlockView(at, address - at, 0, "free"))
            nbytes = self._size(address, following - address, slack=slack)
            blocks.append(BlockView(address, nbytes, self._live[address].requested_bytes, "live"))
            at = address + nbytes
        if at < end:
            blocks.append(BlockView(at, end - at, 0, "free"))
        return blocks

    def _size(self, address: int, room: int, *, slack: bool) -> int:
        """Return the size of the live block at `address`.

        The next block comes after `room` bytes. If it was freed later, no event has its size. Up to 1 MiB after the
        requested size may belong to it (`slack`). All of it does if no more is left up to the next block, because
        blocks of the large pool are above 1 MiB. Blocks too large to be split take all.
        """
        live = self._live[address]
        if live.nbytes is not None and live.nbytes <= room:
            return live.nbytes
        nbytes = round_size(live.requested_bytes, self._config.roundup_power2_divisions)
        if nbytes > room or live.nbytes is not None:
            raise RequestError(
                f"the snapshot's events and segments do not belong together: a block of {nbytes} bytes at {address:#x}"
                f" has only {room}"
            )
        # Unknown: take all of the room where the allocator's rules say so.
        most = self._config.max_split_bytes
        takes_all = slack and (room - nbytes <= SMALL_BYTES or (most is not None and nbytes >= most))
        self.unsure += slack and not takes_all
        return room if takes_all else nbytes

    def _find_ends(self, addresses: list[int]) -> None:
        """Find the ends of blocks that were freed later.

        A block ends where the first allocation after it was placed. That is at the front of the free block there,
        because a block's neighbour is another block or the front of a free one.
        """
        # Blocks of large segments whose size is unknown, with their segment's end.
        waiting = {
            address: start + nbytes
            for start, (nbytes, _) in self._plain.items()
            if nbytes > SMALL_SEGMENT_BYTES
            for address in _between(addresses, start, start + nbytes)
            if self._live[address].nbytes is None
        }
        # The first allocation directly after a waiting block tells its end.
        for entry in self._trace[self._first :]:
            if entry.action == "free_completed":
                waiting.pop(entry.address, None)
            elif entry.action == "alloc" and waiting:
                before = bisect_right(addresses, entry.address) - 1
                address = addresses[before] if before >= 0 else -1
                if entry.address < waiting.get(address, 0):
                    del waiting[address]
                    live = self._live[address]
                    nbytes = round_size(live.requested_bytes, self._config.roundup_power2_divisions)
                    if nbytes <= entry.address - address <= nbytes + SMALL_BYTES:
                        live.nbytes = entry.address - address

    def _small(self, address: int) -> bool:
        """Return whether expandable memory at `address` is of the small pool, by the nearest known block."""
        if self._evidence:
            self._evidence.sort()
            at = bisect_left(self._evidence, (address, False))
            near = self._evidence[max(at - 1, 0) : at + 1]
            return min(near, key=lambda known: abs(known[0] - address))[1]
        return False

    def _mapped(self, stream: int, before: int) -> list[int]:
        """Return where the trace maps memory of `stream` below `before`, as near as it can be of one segment."""
        maps = [entry for entry in self._trace if entry.action == "segment_map" and entry.stream == stream]
        return [entry.address for entry in maps if before - _MOST_SPANNED <= entry.address < before]

    def _ranges(self, stream: int) -> Ranges:
        return self._expandable_memory.setdefault(stream, Ranges())


def _between(addresses: list[int], start: int, end: int) -> list[int]:
    return addresses[bisect_left(addresses, start) : bisect_left(addresses, end)]
