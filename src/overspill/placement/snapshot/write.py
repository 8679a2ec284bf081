"""Write a simulated run as a memory snapshot for PyTorch's viewers.

They are pytorch.org/memory_viz and torch.cuda._memory_viz. Every key is one that torch/csrc/cuda/memory_snapshot.cpp
writes (torch 2.13). The one addition is the viewer's `category`, by which it colours allocations.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from overspill.core import Frame
from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.core.files import write_whole
from overspill.placement.allocators.base import NOWHERE, Allocator, SegmentEvent, SegmentView
from overspill.placement.allocators.caching import SMALL_SEGMENT_BYTES, round_size
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.allocators.registry import allocator_named
from overspill.placement.events import ALLOCATE, FREE, Events

from .device_trace import LOSSES
from .read import DEFAULT_POOL
from .settings import settings_of

PICKLE_PROTOCOL = 4
"""The latest that the viewer's reader knows (torch/utils/viz/MemoryViz.js)."""
UNKNOWN_CATEGORY = "unknown"
"""The category of everything but tensors; the viewer requires it if categories are used."""
_NO_CONTEXT = "N/A"


@dataclass(frozen=True)
class Origin:
    """Where an allocation comes from; `frames` are (file, line, name), the innermost first."""

    frames: tuple[tuple[str, int, str], ...] = ()
    category: str = UNKNOWN_CATEGORY
    metadata: str = ""


NO_ORIGIN = Origin()


def frames_of(stack: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    """Return an Origin's frames for a stack whose outermost line is first."""
    return tuple((f.file, f.line, f"backward of {f.function}" if f.backward else f.function) for f in reversed(stack))


@dataclass(frozen=True)
class Span:
    """A named range of events, from `start` until before `end`."""

    name: str
    start: int
    end: int


def write_snapshot(
    path: str | Path,
    events: Events,
    *,
    allocator: str = "pytorch",
    config: Any = None,
    capacity_bytes: int | None = None,
    origins: Sequence[Origin] = (),
    spans: Sequence[Span] = (),
) -> None:
    """Write the snapshot of a run of `events` to `path`.

    The run is on an empty device of `capacity_bytes` (None: unlimited). `origins` has one for each block. A run that
    runs out of memory ends with `oom`. Raises RequestError if the file cannot be written.
    """
    content = snapshot_of(
        events, allocator=allocator, config=config, capacity_bytes=capacity_bytes, origins=origins, spans=spans
    )
    write_whole(path, pickle.dumps(content, protocol=PICKLE_PROTOCOL))


def snapshot_of(
    events: Events,
    *,
    allocator: str = "pytorch",
    config: Any = None,
    capacity_bytes: int | None = None,
    origins: Sequence[Origin] = (),
    spans: Sequence[Span] = (),
) -> dict[str, Any]:
    """Return the content that `write_snapshot` writes."""
    run = _SnapshotRun(allocator_named(allocator, config, capacity_bytes=capacity_bytes))
    run.do(events)
    settings = config if isinstance(config, CachingConfig) else CachingConfig()
    trace = _Trace(run, events, origins, settings)
    trace.write()
    return {
        "segments": _segments(run, trace, settings),
        "device_traces": [trace.entries],
        "allocator_settings": settings_of(settings),
        "external_annotations": trace.annotations(spans),
    }


@dataclass
class _SnapshotRun:
    """The events on the allocator: addresses, and the blocks live in the end."""

    allocator: Allocator
    addresses: list[int | None] = field(default_factory=list)
    """None for an allocation that failed."""
    live: dict[int, int] = field(default_factory=dict)
    stopped_at: int | None = None
    """The first event that was not done, in a stopped run."""

    def do(self, events: Events) -> None:
        """Do `events` up to the first allocation that fails and is not elastic."""
        placed: dict[int, int | None] = {}
        rows = zip(
            events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), events.stream.tolist(), strict=True
        )
        for at, (action, block, nbytes, stream) in enumerate(rows):
            self.allocator.clock = at
            # Free or allocate; a failed allocation has no address.
            if action == FREE:
                if block not in placed:
                    raise RequestError(f"event {at} frees block {block}, which is not live")
                address = placed.pop(block)
                if address is not None:
                    self.allocator.free(address)
            else:
                if block in placed:
                    raise RequestError(f"event {at} allocates block {block}, which is live")
                address = placed[block] = self._allocate(nbytes, stream)
            # Stop where there is no room.
            self.addresses.append(address)
            if address is None and action == ALLOCATE:
                self.stopped_at = at
                break
        self.live = {address: block for block, address in placed.items() if address}

    def _allocate(self, nbytes: int, stream: int) -> int | None:
        try:
            return self.allocator.allocate(nbytes, stream)
        except OutOfMemoryError:
            return None


class _Trace:
    """The entries of the device's trace; an entry's time in microseconds is its position."""

    def __init__(self, run: _SnapshotRun, events: Events, origins: Sequence[Origin], settings: CachingConfig) -> None:
        self.entries: list[dict[str, Any]] = []
        self._run, self._events, self._origins, self._settings = run, events, origins, settings
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._frame: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._times: list[int] = []
        self._sizes: dict[int, tuple[int, int]] = {}
        self._reserved = 0

    def write(self) -> None:
        """Write the entries of all events that were done."""
        exchanges = {at: list(group) for at, group in groupby(self._run.allocator.segment_log, key=lambda e: e.at)}
        events = self._events
        for at, address in enumerate(self._run.addresses):
            self._times.append(len(self.entries))
            block, nbytes, stream = int(events.block[at]), int(events.nbytes[at]), int(events.stream[at])
            for exchange in exchanges.get(at, ()):
                self._exchange(exchange, block)
            # Exchanges with the device come before the event itself.
            if events.action[at] == FREE:
                if address:
                    size, owner = self._sizes.pop(address)
                    for action in ("free_requested", "free_completed"):
                        self._entry(action, address, size, owner, block)
            elif address is None:
                self._out_of_memory(nbytes, stream, block)
            elif address != NOWHERE:
                self._sizes[address] = (nbytes, stream)
                self._entry("alloc", address, nbytes, stream, block, category=self.origin(block).category)
        self._times.append(len(self.entries))

    def origin(self, block: int) -> Origin:
        """Return the Origin of `block`."""
        return self._origins[block] if block < len(self._origins) else NO_ORIGIN

    def frames(self, block: int) -> list[dict[str, Any]]:
        """Return the frames of `block`, shared so that the pickle holds each once."""
        if block not in self._frames:
            for file, line, name in (frames := self.origin(block).frames):
                self._frame.setdefault((file, line, name), {"filename": file, "line": line, "name": name})
            self._frames[block] = [self._frame[frame] for frame in frames]
        return self._frames[block]

    def annotations(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """Return the spans as PyTorch writes those of torch.profiler.record_function, in time order."""
        ends = [(end, stage, span.name) for span in spans for end, stage in ((span.start, "START"), (span.end, "END"))]
        last = len(self._times) - 1
        return [
            {"stage": stage, "name": name, "device": 0, "time_us": self._times[min(end, last)]}
            for end, stage, name in sorted(ends)
        ]

    def _exchange(self, exchange: SegmentEvent, block: int) -> None:
        self._reserved += -exchange.nbytes if exchange.action in LOSSES else exchange.nbytes
        _, action, address, nbytes, stream = exchange
        self._entry(action, address, nbytes, stream, block, category=UNKNOWN_CATEGORY)

    def _out_of_memory(self, nbytes: int, stream: int, block: int) -> None:
        """Add a failed allocation, with its rounded size as PyTorch records it, and the device's free bytes."""
        capacity = self._run.allocator.capacity_bytes
        size = round_size(nbytes, self._settings.roundup_power2_divisions)
        left = 0 if capacity is None else capacity - self._reserved
        self._entry("oom", left, size, stream, block)

    def _entry(self, action: str, address: int, nbytes: int, stream: int, block: int, **more: str) -> None:
        self.entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": nbytes,
                "stream": stream,
                "compile_context": _NO_CONTEXT,
                "user_metadata": self.origin(block).metadata,
                "time_us": len(self.entries),
                "pool_id": DEFAULT_POOL,
                "frames": self.frames(block),
                **more,
            }
        )


def _segments(run: _SnapshotRun, trace: _Trace, settings: CachingConfig) -> list[dict[str, Any]]:
    """Return the final segments; of an expandable one, each range of mapped memory is listed as one."""
    first_maps = {e.address: e.nbytes for e in reversed(run.allocator.segment_log) if e.action == "segment_map"}
    found = []
    for view in run.allocator.segments():
        expandable = settings.expandable_segments and run.allocator.name == "pytorch"
        small = (first_maps.get(view.address, 0) if expandable else view.nbytes) <= SMALL_SEGMENT_BYTES
        # Split at unmapped space.
        for mapped, group in groupby(view.blocks, key=lambda block: block.state != "unmapped"):
            if mapped:
                blocks = tuple(group)
                nbytes = sum(block.nbytes for block in blocks)
                part = SegmentView(blocks[0].address, nbytes, nbytes, view.stream, blocks)
                found.append(_segment(part, run, trace, small=small, expandable=expandable))
    return found


def _segment(view: SegmentView, run: _SnapshotRun, trace: _Trace, *, small: bool, expandable: bool) -> dict[str, Any]:
    live = [block for block in view.blocks if block.state == "live"]
    used = sum(block.nbytes for block in live)
    # With the keys of memory_snapshot.cpp.
    return {
        "device": 0,
        "address": view.address,
        "total_size": view.nbytes,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(block.requested_bytes for block in live),
        "stream": view.stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": DEFAULT_POOL,
        "is_expandable": expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.nbytes,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.state == "live" else "inactive",
                "frames": trace.frames(run.live[block.address]) if block.state == "live" else [],
            }
            for block in view.blocks
        ],
    }
