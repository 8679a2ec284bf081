"""Choose when to await offloads and when to issue prefetches.

Each is at the latest step that costs no time, or at the earliest that memory demands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device

from .gaps import earliest_return, latest_release
from .step_program import Gap, Positions, StepProgram

Seconds = NDArray[np.float64]


def needs_copy(program: StepProgram, gaps: Iterable[Gap]) -> set[Gap]:
    """Return the gaps whose tensor must be copied to the store; others have a valid copy there already."""
    found: set[Gap] = set()
    by_tensor: dict[int, list[Gap]] = {}
    for gap in gaps:
        by_tensor.setdefault(gap.tensor, []).append(gap)
    for tensor, swaps in by_tensor.items():
        written = program.written[tensor]
        kept = tensor in program.graph.read_only or any(gap.wraps for gap in swaps)
        copied = -1 if kept else None  # when the store's copy was made
        for gap in sorted(swaps, key=lambda g: g.start):
            if copied is None or bisect_left(written, copied + 1) < bisect_left(written, gap.start + 1):
                found.add(gap)
                copied = gap.start
    return found


def releases(
    program: StepProgram,
    gaps: Collection[Gap],
    live: Positions,
    clock: Seconds,
    device: Device,
    budget_bytes: int,
    offloads: Mapping[Gap, int] | None = None,
) -> dict[Gap, int]:
    """Return the step before which each offload is awaited: when it is done, or earlier if memory is short.

    This is Dymem's barrier-free offload (§3.2.1): compute waits for a copy only when memory is short. Then the copy
    that is done first goes first. Bytes that stay longer are added to `live`. `offloads` are the steps before which
    transfers start, by default where gaps do.
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
    # Follow link and compute step by step.
    for position in range(program.length + 1):
        now = clock[position] + delay
        for gap in starting[position]:
            link_free = max(link_free, now) + device.offload_seconds(tensors[gap.tensor].nbytes)
            leaving[gap] = link_free
        if not leaving:
            continue
        # Await copies that are done, due, or needed for memory.
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


def where_memory_allows(
    program: StepProgram, wanted: Mapping[Gap, int], live: Positions, budget_bytes: int, released: Mapping[Gap, int]
) -> dict[Gap, int]:
    """Return the step before which each prefetch is issued: as `wanted`, or later if memory is short.

    Prefetches are served in the order of need. Bytes that arrive sooner are added to `live`.
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
