"""When transfers start and are awaited: the latest that costs no time, the earliest that memory demands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device

from .assemble import Transfer
from .base import earliest_return, latest_release
from .program import Gap, Positions, Program

Seconds = NDArray[np.float64]
ISSUE_MARGIN = 1.2
"""Prefetches are issued as if they took this much longer, for a transfer's real time varies."""


def needs_copy(program: Program, gaps: Iterable[Gap]) -> set[Gap]:
    """Those of `gaps` whose tensor must be sent to the store: a second trip, not updated since, finds its copy there."""
    found: set[Gap] = set()
    by_tensor: dict[int, list[Gap]] = {}
    for gap in gaps:
        by_tensor.setdefault(gap.tensor, []).append(gap)
    for tensor, trips in by_tensor.items():
        written = program.written[tensor]
        copied = -1 if any(gap.wraps for gap in trips) else None  # when the store's copy was made
        for gap in sorted(trips, key=lambda g: g.start):
            if copied is None or bisect_left(written, copied + 1) < bisect_left(written, gap.start + 1):
                found.add(gap)
                copied = gap.start
    return found


def timed(
    program: Program,
    gaps: Collection[Gap],
    live: Positions,
    seconds: Sequence[float],
    device: Device,
    budget_bytes: int,
) -> list[Transfer]:
    """Transfers for `gaps`, released and issued as `releases` and `issues` find; `live` are the bytes without them.

    `live` must be within the budget. Memory for a tensor that is still leaving or already arriving is taken only
    where the budget has room.
    """
    clock = np.concatenate([[0.0], np.cumsum(program.durations(seconds))])
    live = live.copy()
    released = releases(program, gaps, live, clock, device, budget_bytes)
    issued = issues(program, gaps, live, clock, device, budget_bytes, released)
    return [Transfer(gap, gap.start + 1, released[gap], issued[gap], gap.end) for gap in gaps]


def releases(
    program: Program,
    gaps: Collection[Gap],
    live: Positions,
    clock: Seconds,
    device: Device,
    budget_bytes: int,
    offloads: Mapping[Gap, int] | None = None,
) -> dict[Gap, int]:
    """Each offload is awaited once it should be done, or before the first step that needs its memory.

    This is Dymem's barrier-free offload (§3.2.1): compute waits for a copy only when memory is short. What `live` has
    to hold longer for it is added to it. `offloads` are the steps before which transfers start, if not where gaps do.
    """
    found: dict[Gap, int] = {}
    link_free = delay = 0.0
    copied = needs_copy(program, gaps)
    for gap in sorted(gaps, key=lambda g: (g.start, g.tensor)):
        nbytes = program.graph.tensors[gap.tensor].nbytes
        first = gap.start + 1
        if gap not in copied:  # the store has it: the device copy can go at once
            found[gap] = first
            continue
        start = first if offloads is None else offloads[gap]
        link_free = max(link_free, clock[start] + delay) + device.offload_seconds(nbytes)
        done = int(np.searchsorted(clock, link_free - delay))
        last = max(first, min(done, latest_release(program, gap)))
        full = np.flatnonzero(live[first:last] + nbytes > budget_bytes)
        found[gap] = release = first + int(full[0]) if full.size else last
        live[first:release] += nbytes
        delay += max(0.0, link_free - (clock[release] + delay))
    return found


def issues(
    program: Program,
    gaps: Collection[Gap],
    live: Positions,
    clock: Seconds,
    device: Device,
    budget_bytes: int,
    released: Mapping[Gap, int],
) -> dict[Gap, int]:
    """Each prefetch is issued as late as it arrives in time, later where there is no room, in the order of need."""
    wanted: dict[Gap, int] = {}
    next_start = float("inf")
    for gap in sorted(gaps, key=lambda g: (g.end, g.tensor), reverse=True):
        duration = ISSUE_MARGIN * device.prefetch_seconds(program.graph.tensors[gap.tensor].nbytes)
        next_start = min(clock[gap.end], next_start) - duration
        wanted[gap] = max(0, int(np.searchsorted(clock, next_start, side="right")) - 1)
    return where_there_is_room(program, wanted, live, budget_bytes, released)


def where_there_is_room(
    program: Program, wanted: Mapping[Gap, int], live: Positions, budget_bytes: int, released: Mapping[Gap, int]
) -> dict[Gap, int]:
    """Prefetches issued at the steps `wanted`, later where there is no room, in the order of need.

    What `live` has to hold sooner for them is added to it.
    """
    found: dict[Gap, int] = {}
    for gap in sorted(wanted, key=lambda g: (g.end, g.tensor)):
        nbytes = program.graph.tensors[gap.tensor].nbytes
        after = 0 if gap.wraps else released[gap]
        first = min(max(wanted[gap], earliest_return(program, gap), after), gap.end)
        full = np.flatnonzero(live[first : gap.end] + nbytes > budget_bytes)
        found[gap] = first + int(full[-1]) + 1 if full.size else first
        live[found[gap] : gap.end] += nbytes
    return found
