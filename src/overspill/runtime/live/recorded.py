"""From the live allocator's recording to a Trace, and back to places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Layout, Trace
from overspill.core.errors import RequestError

ALIGNMENT_BYTES = 512
"""PyTorch's kernels rely on addresses that are multiples of this (kMinBlockSize of its caching allocator)."""
ARENA, POOL = 0, 1
"""Spaces of a recorded trace: a POOL block is still live when the next step requests it again."""

_ALLOCATE, _FREE, _STEP = 0, 1, 2
_OUTSIDE = -1


@dataclass(frozen=True, eq=False)
class PlannedRequests:
    """The planned requests in order, as arrays.

    Their offset in an arena of `nbytes`, size (-1: not in the arena), stream, start and end.
    """

    nbytes: int
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def recorded_trace(rows: NDArray[np.int64]) -> tuple[Trace, dict[int, int]]:
    """The trace of a recorded step, and the stream of each stream number.

    Of several steps it is the last but one, since the last tells what becomes of blocks that it leaves: one that is
    freed in the next step, before it is requested again, lives at the beginning and at the end of the trace, with a gap
    between; one that lives on is of the space POOL. Of a single step, what is left is live to the end.
    Positions count allocations and frees; sizes are rounded up to ALIGNMENT_BYTES.
    """
    steps = _steps(rows)
    which = max(len(steps) - 2, 0)
    step = steps[which]
    # When each block is freed, in this step or the next.
    freed = {int(row[1]): at for at, row in enumerate(step) if row[0] == _FREE}
    freed_next = (
        {int(row[1]): at for at, row in enumerate(steps[which + 1]) if row[0] == _FREE} if len(steps) > 1 else {}
    )
    # A block for each allocation.
    numbers: dict[int, int] = {}
    blocks: list[Block] = []
    for at, (what, number, nbytes, stream) in enumerate(step.tolist()):
        if what != _ALLOCATE:
            continue
        block = Block(
            len(blocks),
            at,
            freed.get(number, len(step)),
            -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES,
            stream=numbers.setdefault(stream, len(numbers)),
            alignment=ALIGNMENT_BYTES,
        )
        if number not in freed and len(steps) > 1:
            block = _beyond_the_step(block, freed_next.get(number))
        blocks.append(block)
    return Trace(tuple(blocks)), {number: stream for stream, number in numbers.items()}


def places_of(trace: Trace, layout: Layout, streams: Mapping[int, int]) -> PlannedRequests:
    """The requests of `trace` in order, with their places in `layout`.

    `streams` gives the stream of a number. Raises InvalidLayout when the layout is not one of the trace, and
    RequestError for gaps that no step can have.
    """
    layout.validate(trace)
    last = max((block.end for block in trace.blocks), default=0)
    rows: list[tuple[int, int, int, int, int]] = []
    for offset, block in zip(layout.offsets, trace.blocks, strict=True):
        if not block.nbytes:
            continue  # no request is made for it
        # A block that lives into the next step is freed there, and requested again later.
        start, end = block.start, block.end
        if block.gaps:
            if len(block.gaps) > 1 or block.start or block.end != last:
                raise RequestError(
                    f"block {block.id} has gaps {block.gaps} in [{start}, {end}); only a block that lives from one step"
                    " into the next can have one here, and is freed and requested once"
                )
            start, end = block.gaps[0][1], last + 1
        planned = block.space == ARENA and start < end
        rows.append(
            (start, offset, block.nbytes if planned else _OUTSIDE, streams.get(block.stream, block.stream), end)
        )
    # As arrays, in the order of the requests.
    rows.sort(key=lambda row: row[0])
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    start_, offset_, size, stream, end_ = (np.ascontiguousarray(column) for column in table.T)
    nbytes = int(np.max((offset_ + size)[size != _OUTSIDE], initial=0))
    return PlannedRequests(nbytes, offset_, size, stream, start_, end_)


def _steps(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows of each step, without the marks between them."""
    marks = np.flatnonzero(rows[:, 0] == _STEP)
    pieces = np.split(rows, marks)
    steps = [piece[piece[:, 0] != _STEP] for piece in pieces]
    return [step for i, step in enumerate(steps) if i or len(step)] or steps


def _beyond_the_step(block: Block, freed_next: int | None) -> Block:
    """A block live at its step's end, given when the next step frees it."""
    if freed_next is None or freed_next > block.start:
        return replace(block, space=POOL)
    return replace(block, start=0, gaps=((freed_next, block.start),)) if freed_next else block
