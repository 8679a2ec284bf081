"""When transfers start and are awaited: the latest that costs no time, the earliest that memory demands.

Copies start as soon as there is something to copy. Twin of native/search/timing.hpp.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device
from overspill.planning.gaps import earliest_return, latest_release

from .assemble import Transfer
from .step_program import Gap, Positions, Program

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
    clock = program.clock(seconds)
    live = live.copy()
    started = {gap: copy_start(program, gap) for gap in gaps}
    released = releases(program, gaps, live, clock, device, budget_bytes, started)
    issued = issues(program, gaps, live, clock, device, budget_bytes, released)
    return [Transfer(gap, started[gap], released[gap], issued[gap], gap.end) for gap in gaps]


def copy_start(program: Program, gap: Gap) -> int:
    """The first step before which the copy for a trip in `gap` can start: behind the last that makes its tensor.

    One that leaves in backward leaves no sooner than a backward graph begins.
    """
    boundary = program.end_of_forward
    start = boundary if gap.start >= boundary and not program.graph.whole_step else 0
    for made in (program.written[gap.tensor], program.births[gap.tensor]):
        if before := bisect_right(made, gap.start):
            start = max(start, made[before - 1] + 1)
    return start


def releases(
    program: Program,
    gaps: Collection[Gap],
    live: Positions,
    clock: Seconds,
    device: Device,
    budget_bytes: int,
    offloads: Mapping[Gap, int] | None = None,
) -> dict[Gap, int]:
    """Each offload is awaited once it should be done; where memory is short before, the one that is done first.

    This is Dymem's barrier-free offload (§3.2.1): compute waits for a copy only when memory is short. What `live` has
    to hold longer for it is added to it. `offloads` are the steps before which transfers start, if not where gaps do.
    """
    found: dict[Gap, int] = {}
    tensors = program.graph.tensors
    copied = needs_copy(program, gaps)
    starting: dict[int, list[Gap]] = defaultdict(list)
    for gap in sorted(gaps, key=lambda g: (g.start, g.tensor)):
        if gap in copied:
            starting[gap.start + 1 if offloads is None else offloads[gap]].append(gap)
        else:  # the store has it: the device copy can go at once
            found[gap] = gap.start + 1
    leaving: dict[Gap, float] = {}  # gap -> when its copy is done, in this order
    link_free = delay = 0.0
    for position in range(program.length + 1):
        now = clock[position] + delay
        for gap in starting[position]:
            link_free = max(link_free, now) + device.offload_seconds(tensors[gap.tensor].nbytes)
            leaving[gap] = link_free
        if not leaving:
            continue
        over = sum(tensors[gap.tensor].nbytes for gap in leaving if gap.start < position)
        over += int(live[position]) - budget_bytes if position < program.length else 0
        for gap in list(leaving):
            due = position >= latest_release(program, gap)
            if gap.start < position and (leaving[gap] <= now or over > 0 or due):
                now = max(now, leaving.pop(gap))
                over -= tensors[gap.tensor].nbytes
                found[gap] = position
        delay = now - clock[position]
    for gap, release in found.items():
        live[gap.start + 1 : release] += tensors[gap.tensor].nbytes
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
