"""Whether a solution fits a capacity; if none can, an infeasible core."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overspill.core import Block, Trace

from .base import Solution
from .columns import Columns


@dataclass(frozen=True)
class PackingVerdict:
    """A solution's verdict on a capacity: it `fits`, or it is `infeasible` for every layout, or neither is known."""

    fits: bool
    infeasible: bool
    infeasible_core: tuple[int, ...] = ()
    """Positions in the trace of the fewest blocks known not to fit together within the capacity."""


def verdict(blocks: Trace | Columns, solution: Solution, capacity_bytes: int | None) -> PackingVerdict:
    """Return the verdict on `capacity_bytes`, which each space may take; None: unlimited."""
    if solution.layout is not None:
        tops = space_peaks(blocks, solution.layout.offsets).values() if capacity_bytes is not None else ()
        if capacity_bytes is None or max(tops, default=0) <= capacity_bytes:
            return PackingVerdict(fits=True, infeasible=False)
    trace = blocks if isinstance(blocks, Trace) else blocks.trace()
    crowd = crowd_above(trace, capacity_bytes) if capacity_bytes is not None else ()
    core = min((found for found in (solution.infeasible_core, crowd) if found), key=len, default=())
    above = capacity_bytes is not None and len(trace.spaces) == 1 and solution.bound_bytes > capacity_bytes
    return PackingVerdict(fits=False, infeasible=bool(core) or above, infeasible_core=core)


def space_peaks(blocks: Trace | Columns, offsets: Sequence[int]) -> dict[int, int]:
    """Return the peak bytes of each space, with block i at `offsets[i]`."""
    columns = Columns.of(blocks) if isinstance(blocks, Trace) else blocks
    return columns.peaks(np.array(offsets, dtype=np.int64))


def crowd_above(trace: Trace, capacity_bytes: int) -> tuple[int, ...]:
    """Return the positions of the fewest blocks live at one time that exceed `capacity_bytes`.

    All are of one space. It is empty if no time has that many bytes. A block that is pinned beyond the capacity is one
    by itself.
    """
    for position, block in enumerate(trace.blocks):
        if block.pieces and (block.pinned or 0) + block.nbytes > capacity_bytes:
            return (position,)
    # Sweep over time with the live blocks sorted by size.
    most, where = len(trace.blocks), None
    for space in trace.spaces:
        live: list[tuple[int, int]] = []
        held = 0  # the bytes of the `most` largest live blocks; sets of more are of no interest any longer
        for time, comes, key in _changes(trace, space):
            at = bisect_left(live, key)
            if comes:
                live.insert(at, key)
            else:
                del live[at]
            if at < most:
                beyond = most if comes else most - 1
                moved = live[beyond][0] if beyond < len(live) else 0
                held += moved - key[0] if comes else key[0] - moved
            # Fewer blocks exceed it here: remember when.
            if held > capacity_bytes:
                most, where = min(most, len(live)), (space, time)
                while held > capacity_bytes:
                    most -= 1
                    held += live[most][0]
    if where is None:
        return ()
    # The largest blocks of that time.
    space, time = where
    there = [(-b.nbytes, i) for i, b in enumerate(trace.blocks) if b.space == space and _alive(b, time)]
    return tuple(sorted(position for _, position in sorted(there)[: most + 1]))


def _alive(block: Block, time: int) -> bool:
    return any(low <= time < high for low, high in block.pieces)


def _changes(trace: Trace, space: int) -> list[tuple[int, bool, tuple[int, int]]]:
    """Return when each block comes or goes, in time order.

    A block is (minus its size, position), so that the largest is the first of many.
    """
    blocks = [(i, block) for i, block in enumerate(trace.blocks) if block.space == space]
    return sorted(
        (time, comes, (-block.nbytes, i))
        for i, block in blocks
        for piece in block.pieces
        for time, comes in zip(piece, (True, False), strict=True)
    )
