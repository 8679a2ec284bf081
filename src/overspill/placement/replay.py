"""Replay events on an allocator: peaks, segments, and whether they fit."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.core import Layout, Trace
from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.core.units import format_bytes

from .allocators import _native
from .allocators.base import SEGMENT_ACTIONS, Allocator, Gauge, config_or_default
from .allocators.native_allocator import NativeAllocator
from .allocators.registry import allocator_type
from .allocators.result import NOT_PLACED, Replay
from .events import ALLOCATE, COLUMNS, EMPTY, FREE, Events
from .simulated_device import ADDRESS_SPACE_BYTES, PAGE_BYTES, round_up

GAUGES = ("requested", "allocated", "reserved")
FRAGMENTS = ("usable", "spread")
_PROBES = 8
"""Capacities above its answer that `minimum_capacity` tries again."""


def replay(
    events: Events,
    allocator: str = "pytorch",
    *,
    capacity_bytes: int | None = None,
    config: Any = None,
    curves: bool = False,
    request_bytes: int | None = None,
) -> Replay:
    """Replay `events` with `allocator` on an empty simulated device.

    The device has `capacity_bytes` (None: unlimited). Replay stops at the first allocation that is not elastic and
    finds too little memory. An allocator that sizes itself by a first run makes that run on the same events. `curves`
    and `request_bytes` (which takes longer) choose the figures kept for every event. Raises RequestError if the events
    free or allocate a block in the wrong state.
    """
    kind, config = allocator_type(allocator), _settled(events, allocator, config)
    if issubclass(kind, NativeAllocator):
        return _replay_natively(events, kind, capacity_bytes, config, curves, request_bytes)
    return replay_on(kind(config, capacity_bytes=capacity_bytes), events, curves=curves, request_bytes=request_bytes)


def _settled(events: Events, allocator: str, config: Any) -> Any:
    """Return `config` with what `allocator` learns from a first run without limit."""

    def trial(first: Any) -> Replay:
        return replay(events, allocator, config=first, request_bytes=0)

    return allocator_type(allocator).settled(config, trial)


def replay_on(
    allocator: Allocator,
    events: Events,
    *,
    curves: bool = False,
    request_bytes: int | None = None,
    ends: Container[int] = (),
) -> Replay:
    """Replay `events` on `allocator`, call by call; a step of the job ends after so many of them as `ends` has."""
    addresses = np.full(events.block_count, NOT_PLACED, dtype=np.int64)
    live: dict[int, int] = {}
    without_room: set[int] = set()
    width = 0 if not curves and request_bytes is None else len(GAUGES if request_bytes is None else GAUGES + FRAGMENTS)
    history: list[list[int]] = []
    failed_at: int | None = None
    skipped = 0
    # Do the events one by one.
    rows = zip(*(getattr(events, column).tolist() for column in COLUMNS), strict=True)
    for at, (action, block, nbytes, stream, mobility) in enumerate(rows):
        allocator.clock = at
        if action == EMPTY:
            allocator.empty_cache()
        elif action != FREE:
            if block in live or block in without_room:
                raise RequestError(f"event {at} allocates block {block}, which is live")
            try:
                live[block] = addresses[block] = allocator.allocate(nbytes, stream, mobility)
            except OutOfMemoryError:
                if action == ALLOCATE:
                    failed_at = at
                    break
                skipped += 1
                without_room.add(block)
        elif block in without_room:
            without_room.remove(block)
        elif block in live:
            allocator.free(live.pop(block))
        else:
            raise RequestError(f"event {at} frees block {block}, which is not live")
        _mark(allocator, at + 1, ends)
        # Keep the curves.
        if width:
            history.append(_figures(allocator, request_bytes))
    # As arrays, like the native core's.
    table = [(e.at, SEGMENT_ACTIONS.index(e.action), e.address, e.nbytes, e.stream) for e in allocator.segment_log]
    return _result(
        allocator=allocator.name,
        capacity_bytes=allocator.capacity_bytes,
        failed_at=failed_at,
        skipped=skipped,
        retries=allocator.retries,
        addresses=addresses,
        segment_table=np.array(table, dtype=np.int64).reshape(len(table), 5),
        gauges=(allocator.requested, allocator.allocated, allocator.reserved),
        curves=list(np.array(history, dtype=np.int64).reshape(len(history), width).T),
    )


def _mark(allocator: Allocator, done: int, ends: Container[int]) -> None:
    """End a step of the job after so many events, if `ends` has their number and the allocator learns from steps."""
    if done in ends and isinstance(allocator, NativeAllocator):
        allocator.mark_step()


def replay_in_steps(allocator: NativeAllocator, events: Events, ends: Sequence[int]) -> list[int] | None:
    """Return how often `allocator` gave memory back to make room, up to each of `ends`, where a step ends.

    None: memory ran out. No event is elastic.
    """
    rows = [*zip(events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), strict=True)]
    return allocator.serve_steps(rows[start:end] for start, end in pairwise((0, *ends)))


def _figures(allocator: Allocator, request_bytes: int | None) -> list[int]:
    found = [allocator.requested.now, allocator.allocated.now, allocator.reserved.now]
    return found if request_bytes is None else [*found, allocator.usable_bytes(request_bytes), allocator.spread_bytes]


def _replay_natively(
    events: Events,
    kind: type[NativeAllocator],
    capacity_bytes: int | None,
    config: Any,
    curves: bool,
    request_bytes: int | None,
) -> Replay:
    settings = asdict(config_or_default(kind.name, kind.config_type, config))
    columns = (events.action, events.block, events.nbytes, events.stream)
    try:
        failed_at, skipped, retries, addresses, table, gauges, histories = _native.replay(
            kind.core, settings, capacity_bytes, *columns, events.block_count, curves, request_bytes, events.mobility
        )
    except ValueError as error:
        raise RequestError(str(error)) from None
    # The answer in the form that both kinds share.
    requested, allocated, reserved = (Gauge(*gauge) for gauge in gauges)
    return _result(
        allocator=kind.name,
        capacity_bytes=capacity_bytes,
        failed_at=None if failed_at < 0 else failed_at,
        skipped=skipped,
        retries=retries,
        addresses=addresses,
        segment_table=table,
        gauges=(requested, allocated, reserved),
        curves=histories,
    )


def _result(*, gauges: tuple[Gauge, Gauge, Gauge], curves: Sequence[NDArray[np.int64]], **fields: Any) -> Replay:
    """Return the Replay with these gauges and curves; gauges are of requested, allocated and reserved bytes."""
    for name, gauge in zip(GAUGES, gauges, strict=True):
        fields[f"peak_{name}_bytes"] = gauge.peak
        fields[f"peak_{name}_at"] = gauge.peak_at
    for name, curve in zip(GAUGES + FRAGMENTS, curves, strict=False):
        fields[name] = np.ascontiguousarray(curve)
    return Replay(**fields)


def minimum_capacity(events: Events, allocator: str = "pytorch", config: Any = None) -> int:
    """Return the least capacity in bytes on which `events` survive, in 2 MiB steps.

    Elastic allocations may fail. It is found by bisection between the peak of requested bytes and a capacity known to
    be enough. Survival need not be monotone: a device too small for the cache makes it give memory back, which can
    happen to help. So a few capacities above the answer are tried too, and if one fails the search goes on above it.
    All that were tried above the answer survive, and the one directly below fails. Raises OutOfMemoryError if no
    capacity is enough.
    """

    def survives(pages: int) -> bool:
        return replay(events, allocator, capacity_bytes=pages * PAGE_BYTES, config=config).fits

    config = _settled(events, allocator, config)
    # A capacity that is enough.
    requested = round_up(events.peak_requested_bytes, PAGE_BYTES) // PAGE_BYTES
    too_little, enough = requested - 1, max(requested, _reserved_pages(events, allocator, config))
    while not survives(enough):
        too_little, enough = max(too_little, enough), enough + max(enough, 1)
        if enough * PAGE_BYTES > ADDRESS_SPACE_BYTES:
            raise OutOfMemoryError(
                f"the {allocator} allocator cannot serve these events on a device of any size"
                f" (peak of requests {format_bytes(events.peak_requested_bytes)})",
                requested_bytes=events.peak_requested_bytes,
                reserved_bytes=0,
                capacity_bytes=None,
            )
    # Bisect, then try some capacities above the answer.
    ceiling = enough
    while True:
        while enough - too_little > 1:
            middle = (too_little + enough) // 2
            too_little, enough = (too_little, middle) if survives(middle) else (middle, enough)
        steps = range(enough + 1, ceiling, max(1, (ceiling - enough) // _PROBES))
        failed = [pages for pages in steps if not survives(pages)]
        if not failed:
            return max(enough, 0) * PAGE_BYTES
        too_little, enough = failed[-1], ceiling


def _reserved_pages(events: Events, allocator: str, config: Any) -> int:
    """Return the pages that `allocator` reserves without a limit; 0 if its settings make no sense without one."""
    try:
        peak = replay(events, allocator, config=config).peak_reserved_bytes
    except RequestError:
        return 0
    return round_up(peak, PAGE_BYTES) // PAGE_BYTES


def layout_of(trace: Trace, allocator: str = "pytorch", config: Any = None) -> Layout:
    """Return the Layout that `allocator` gives `trace` on an unlimited device.

    Offsets count only addresses that were ever backed by memory, so that the peak is what the allocator needed. An
    allocator that maps memory to one address after another has virtual addresses, and the peak can be more.
    """
    events = Events.of(trace, by_references=allocator_type(allocator).by_references)
    result = replay(events, allocator, config=config)
    if result.failed_at is not None:
        raise RequestError(f"the {allocator} allocator cannot place this trace in its address space")
    # Number the bytes that were ever backed by memory.
    ranges = _backed(result.segment_table)
    starts = np.array([start for start, _ in ranges] or [0], dtype=np.int64)
    sizes = np.array([end - start for start, end in ranges] or [0], dtype=np.int64)
    before = np.cumsum(sizes) - sizes
    index = np.searchsorted(starts, result.addresses, side="right") - 1
    offsets = [
        int(before[i] + address - starts[i]) if block.nbytes else 0
        for i, address, block in zip(index, result.addresses, trace.blocks, strict=True)
    ]
    peak = max((offset + b.nbytes for offset, b in zip(offsets, trace.blocks, strict=True) if b.pieces), default=0)
    return Layout(allocator, tuple(offsets), peak, trace.lower_bound_bytes)


def _backed(table: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the address ranges that were ever backed by memory, joined, in order."""
    ranges: list[tuple[int, int]] = []
    gained = table[(table[:, 1] == 0) | (table[:, 1] == 2)]
    for start, nbytes in sorted(map(tuple, gained[:, 2:4].tolist())):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], start + nbytes))
        else:
            ranges.append((start, start + nbytes))
    return ranges
