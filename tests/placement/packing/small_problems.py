"""Small random problems, and the optimum of a trace by trying every order of placing its blocks."""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path

from hypothesis import strategies as st

from overspill.core import Block, Trace

INSTANCES = Path(__file__).parents[3] / "bench" / "instances"


def instance(name: str) -> Trace:
    """One of the challenging instances of minimalloc."""
    with (INSTANCES / f"{name}.1048576.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Trace(tuple(Block(i, int(r["lower"]), int(r["upper"]), int(r["size"])) for i, r in enumerate(rows)))


@st.composite
def blocks(draw: st.DrawFn, number: int, *, alignments: tuple[int, ...], gaps: bool, pins: bool) -> Block:
    start, end = sorted((draw(st.integers(0, 6)), draw(st.integers(0, 6))))
    end += 1
    holes: tuple[tuple[int, int], ...] = ()
    if gaps and end - start >= 3 and draw(st.booleans()):
        low = draw(st.integers(start + 1, end - 2))
        holes = ((low, draw(st.integers(low + 1, end - 1))),)
    alignment = draw(st.sampled_from(alignments))
    pinned = alignment * draw(st.integers(0, 6)) if pins and draw(st.integers(0, 2)) == 0 else None
    return Block(number, start, end, draw(st.integers(1, 8)), alignment=alignment, pinned=pinned, gaps=holes)


@st.composite
def traces(draw: st.DrawFn, most: int = 5) -> Trace:
    """A trace of at most so many blocks: plain, or with alignments, gaps, pins, or all of them."""
    alignments = draw(st.sampled_from([(1,), (4,), (1, 2), (2, 3, 4)]))
    gaps, pins = draw(st.booleans()), draw(st.booleans())
    count = draw(st.integers(1, most))
    return Trace(tuple(draw(blocks(i, alignments=alignments, gaps=gaps, pins=pins)) for i in range(count)))


def optimum(trace: Trace) -> int | None:
    """The smallest peak of any layout; None if two pinned blocks overlap."""
    every = trace.blocks

    def meet(a: Block, b: Block) -> bool:
        return any(s < f and e < t for s, t in a.pieces for e, f in b.pieces)

    offsets = {b.id: b.pinned for b in every if b.pinned is not None}
    for a, b in combinations([b for b in every if b.id in offsets], 2):
        if meet(a, b) and offsets[a.id] < offsets[b.id] + b.nbytes and offsets[b.id] < offsets[a.id] + a.nbytes:
            return None
    best = sum(b.nbytes + b.alignment for b in every) + max((o for o in offsets.values()), default=0)

    def place(left: list[Block], offsets: dict[int, int], peak: int) -> None:
        nonlocal best
        if peak >= best:
            return
        if not left:
            best = peak
        for block in left:
            below = sorted((offsets[b.id], b.nbytes) for b in every if b.id in offsets and meet(b, block))
            offset = 0
            for low, nbytes in below:
                if offset + block.nbytes <= low:
                    break
                offset = -(-max(offset, low + nbytes) // block.alignment) * block.alignment
            rest = [b for b in left if b is not block]
            place(rest, {**offsets, block.id: offset}, max(peak, offset + block.nbytes))

    held = max((o + b.nbytes for b in every if (o := b.pinned) is not None), default=0)
    place([b for b in every if b.pinned is None], offsets, held)
    return best
