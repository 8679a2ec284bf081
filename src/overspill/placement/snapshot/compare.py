"""Replay a recorded trace on the simulated allocator, and compare the two.

Every allocation and free of the trace is done again. In between, the recorded allocator exchanged memory with the
device, and so does the simulated one:

    recorded    free | segment_free segment_free segment_alloc | alloc …
    simulated   free | segment_free segment_free segment_alloc | alloc …
                     ^ must be equal in action, size and stream ^ must be at the same address

The device is not simulated: it answers as it was recorded, with the same addresses and the same failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.core.units import format_bytes
from overspill.placement.allocators.base import SEGMENT_ACTIONS, SegmentEvent
from overspill.placement.allocators.caching import SMALL_SEGMENT_BYTES
from overspill.placement.allocators.caching_config import CachingConfig

from .device_trace import LOSSES, DeviceTrace, device_trace, stream_numbers
from .read import Snapshot, TraceEntry
from .recorded_device import RecordedAllocator, RecordedDevice
from .result import SnapshotReplay
from .settings import config_of
from .start import StartSegment, start_of


def replay_snapshot(
    snapshot: Snapshot,
    device: int | None = None,
    *,
    config: CachingConfig | None = None,
    capacity_bytes: int | None = None,
) -> SnapshotReplay:
    """Return the comparison for one device, with the recorded settings or `config`.

    `device` None: the first that has events. `capacity_bytes` is the device's memory; only garbage collection and a
    memory fraction need it. Raises RequestError if the snapshot holds no events of the device, or if its events and its
    segments do not belong together.
    """
    device = next(iter(snapshot.devices), 0) if device is None else device
    settings, notes = config_of(snapshot) if config is None else (config, ())
    recording = device_trace(snapshot, device)
    start, unsure = start_of(recording, settings)
    if any(segment.expandable != settings.expandable_segments for segment in start):
        kinds = ("not expandable", "expandable")[:: -1 if settings.expandable_segments else 1]
        raise RequestError(f"the settings make segments {kinds[0]}, but the trace begins with some that are {kinds[1]}")
    replayed = _Comparison(recording, start, settings, capacity_bytes)
    replayed.run()
    return replayed.result(device, (*notes, *recording.notes, *_unknown(start, unsure, settings, capacity_bytes)))


def _unknown(
    start: Sequence[StartSegment], unsure: int, config: CachingConfig, capacity_bytes: int | None
) -> tuple[str, ...]:
    """Return notes on data that the recording does not contain."""
    notes = []
    if unsure:
        notes.append(f"{unsure} blocks that were live at the start may be up to 1 MiB larger than they are taken to be")
    if start:
        notes.append(
            "the trace begins with memory in use, whose state is derived from the snapshot's segments"
            + ("; where its expandable segments begin is assumed" if any(s.expandable for s in start) else "")
        )
    if start and config.garbage_collection_threshold:
        notes.append("the ages of blocks that were free at the start, by which garbage is collected, are not recorded")
    if config.garbage_collection_threshold and (capacity_bytes is None or config.per_process_memory_fraction == 1):
        notes.append(
            "garbage is not collected in the replay: it needs the capacity and per_process_memory_fraction below 1"
        )
    return tuple(notes)


@dataclass
class _Difference:
    segments: str | None = None
    placement: str | None = None
    final: str | None = None
    misplaced: int = 0


@dataclass
class _Counts:
    allocations: int = 0
    frees: int = 0
    out_of_memory: int = 0
    segment_events: int = 0
    cache_releases: int = 0
    compared: int = 0


@dataclass
class _Comparison:
    """The replay of one recording."""

    recording: DeviceTrace
    start: Sequence[StartSegment]
    config: CachingConfig
    capacity_bytes: int | None
    counts: _Counts = field(default_factory=_Counts)
    found: _Difference = field(default_factory=_Difference)

    def __post_init__(self) -> None:
        self.device = RecordedDevice(self.capacity_bytes)
        self.allocator = RecordedAllocator(self.config, self.device)
        self.device.exchanged = lambda: self.allocator.exchanged - self._before
        self._before = 0
        self._numbers = stream_numbers(self.recording)
        self._addresses = {b.address: b.address for s in self.start for b in s.view.blocks if b.state == "live"}
        self.live_at_start = len(self._addresses)
        for segment in self.start:
            view = segment.view
            self.device.adopt(view.address, view.mapped_bytes, plain=not segment.expandable)
            self.allocator.adopt(segment, self._numbers[view.stream])
        self.reserved_at_start = self.device.used_bytes
        self._most_reserved = self._recorded_peak()

    def run(self) -> None:
        """Replay until the exchanges with the device differ."""
        group: list[TraceEntry] = []
        for at, entry in enumerate(self.recording.trace):
            if at < self.recording.first:
                continue
            if entry.action in SEGMENT_ACTIONS:
                group.append(entry)
            elif entry.action != "free_requested":
                self._step(at, entry, group)
                if self.found.segments is not None:
                    self.counts.compared = at - len(group)
                    return
                group = []
        # Exchanges after the last event.
        if group:
            self._step(len(self.recording.trace) - 1, None, group)
        self.counts.compared = len(self.recording.trace)
        if self.found.segments is None:
            self._compare_final_blocks()

    def _step(self, at: int, entry: TraceEntry | None, group: list[TraceEntry]) -> None:
        """Repeat `entry`, and compare the exchanges before it with the recorded ones in `group`."""
        self._before = len(self.allocator.segment_log)
        self.device.expected, self.device.refuses = group, entry is not None and entry.action == "oom"
        self.counts.segment_events += len(group)
        # Memory given back without need: the program has emptied the cache.
        allocates = entry is not None and entry.action in ("alloc", "oom")
        if any(e.action in LOSSES for e in group) and not (allocates and self._is_retry(entry, group)):
            self.counts.cache_releases += 1
            self.allocator.empty_cache()
        failure, elsewhere = self._allocate(at, entry) if entry is not None and allocates else (None, None)
        # Compare the exchanges, then free.
        difference, misplaced = self._exchange_difference(group)
        if difference is not None or failure is not None:
            self.found.segments = f"{self._where(at, entry)}: {difference or failure}"
        elif misplaced is not None or elsewhere is not None:
            self.found.placement = self.found.placement or f"{self._where(at, entry)}: {misplaced or elsewhere}"
        if entry is not None and entry.action == "free_completed":
            self.counts.frees += 1
            self.allocator.free(self._addresses.pop(entry.address))

    def _is_retry(self, entry: TraceEntry | None, group: list[TraceEntry]) -> bool:
        """Return whether memory was released to serve `entry`, and not because the program requested it.

        A retry ends with new memory or without any. It comes when the cache has nothing that fits and the device is
        full. The device is not full if as much was in use at another time.
        """
        if entry is None or entry.action == "oom":
            return True
        gains = sum(e.nbytes for e in group if e.action not in LOSSES)
        if not gains or self.allocator.finds(entry.nbytes, self._numbers[entry.stream]):
            return False
        return self.allocator.collects_garbage or self.device.used_bytes + gains > self._most_reserved

    def _allocate(self, at: int, entry: TraceEntry) -> tuple[str | None, str | None]:
        """Allocate as `entry` did, and return how outcome and place differ."""
        fails = entry.action == "oom"
        self.device.later_maps = lambda: self._maps(at, entry)
        self.counts.out_of_memory += fails
        self.counts.allocations += not fails
        try:
            address = self.allocator.allocate(entry.nbytes, self._numbers[entry.stream])
        except OutOfMemoryError:
            if not fails:
                return "the simulated allocator finds no room", None
            self.device.measure(entry.device_free)
            return None, None
        if fails:
            return f"the simulated allocator finds room, at {address:#x}", None
        # Later frees refer to the recorded address.
        self._addresses[entry.address] = address
        if address == entry.address:
            return None, None
        self.found.misplaced += 1
        return None, f"simulated at {address:#x}"

    def _maps(self, at: int, entry: TraceEntry) -> Iterator[int]:
        """Yield where memory of this pool and stream is mapped next, from the allocation `entry` (event `at`) on."""
        small = self.allocator.is_small(entry.nbytes)
        own = self.device.expected[self.device.exchanged() :]
        for later in chain(own, islice(self.recording.trace, at, None)):
            is_map = later.action == "segment_map" and later.stream == entry.stream
            if is_map and (later.nbytes <= SMALL_SEGMENT_BYTES) is small:
                yield later.address

    def _exchange_difference(self, group: list[TraceEntry]) -> tuple[str | None, str | None]:
        """Return the first exchange that differs, and the first at another address."""
        done = self.allocator.segment_log[self._before :]
        misplaced: str | None = None
        for recorded, simulated in zip(group, done, strict=False):
            text = f"recorded {_exchange(recorded)}, simulated {_exchange(simulated)}"
            expected = (recorded.action, recorded.nbytes, self._numbers[recorded.stream])
            if expected != (simulated.action, simulated.nbytes, simulated.stream):
                return text, misplaced
            if recorded.address != simulated.address:
                self.found.misplaced += 1
                misplaced = misplaced or text
        if len(group) > len(done):
            return f"recorded {_exchange(group[len(done)])}, which the simulated allocator does not do", misplaced
        if len(done) > len(group):
            return f"simulated {_exchange(done[len(group)])}, which was not recorded", misplaced
        return None, misplaced

    def _compare_final_blocks(self) -> None:
        """Compare the final blocks with those of the snapshot."""
        recorded = {
            address: (block.nbytes, block.live)
            for segment in self.recording.segments
            for address, block in segment.placed()
        }
        simulated = {
            b.address: (b.nbytes, b.state == "live")
            for segment in self.allocator.segments()
            for b in segment.blocks
            if b.state != "unmapped"
        }
        # Note the first difference by address.
        for address in sorted(recorded.keys() | simulated.keys()):
            before, after = recorded.get(address), simulated.get(address)
            if before != after:
                self.found.final = (
                    f"in the end: at {address:#x} there is {_block(before)} in the snapshot, simulated {_block(after)}"
                )
                return

    def _recorded_peak(self) -> int:
        """Return the peak bytes that the recorded allocator held."""
        now = most = self.reserved_at_start
        for entry in self.recording.trace:
            if entry.action in SEGMENT_ACTIONS:
                now += -entry.nbytes if entry.action in LOSSES else entry.nbytes
                most = max(most, now)
        return most

    def _where(self, at: int, entry: TraceEntry | None) -> str:
        """Return a description of the event, with the Python line that caused it."""
        total = len(self.recording.trace)
        if entry is None:
            return f"after the last of {total} events"
        place = f" by {entry.place}" if entry.place else ""
        what = f" of {format_bytes(entry.nbytes)}" if entry.nbytes else ""
        address = f" at {entry.address:#x}" if entry.address else ""
        return f"event {at} of {total}, {entry.action}{what}{address}{place}"

    def result(self, device: int, notes: tuple[str, ...]) -> SnapshotReplay:
        """Return the comparison."""
        found, counts, allocator = self.found, self.counts, self.allocator
        finished = found.segments is None
        # Only a replay that reached the end can be equal.
        return SnapshotReplay(
            device=device,
            config=self.config,
            events=len(self.recording.trace),
            left_out=self.recording.left_out,
            live_at_start=self.live_at_start,
            reserved_at_start_bytes=self.reserved_at_start,
            segment_events_equal=finished,
            placements_equal=finished and found.placement is None,
            final_blocks_equal=finished and found.final is None,
            misplaced=found.misplaced,
            difference=found.placement or found.segments or found.final,
            retries=allocator.retries,
            least_capacity_bytes=self.device.least_capacity_bytes,
            capacity_above_bytes=self.device.capacity_above_bytes,
            peak_requested_bytes=allocator.requested.peak,
            peak_allocated_bytes=allocator.allocated.peak,
            peak_reserved_bytes=allocator.reserved.peak,
            notes=notes,
            **vars(counts),
        )


def _exchange(event: TraceEntry | SegmentEvent) -> str:
    return f"{event.action} of {format_bytes(event.nbytes)} at {event.address:#x}"


def _block(block: tuple[int, bool] | None) -> str:
    if block is None:
        return "no block"
    return f"a {'live' if block[1] else 'free'} block of {block[0]} bytes"
