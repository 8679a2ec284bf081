"""Small random problems, and the optimum of a trace by trying every order of placing its blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from overspill.core import Block, Trace
from overspill.placement.packing.files import read_trace

INSTANCES = Path(__file__).parents[3] / "bench" / "instances"


def instance(name: str) -> Trace:
    """One of the challenging instances of minimalloc."""
    return read_trace(INSTANCES / f"{name}.1048576.csv").trace


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
    """A trace of at most so many blocks: plain, or with alignments, gaps, pins that do not clash, or all of them."""
    alignments = draw(st.sampled_from([(1,), (4,), (1, 2), (2, 3, 4)]))
    gaps, pins = draw(st.booleans()), draw(st.booleans())
    count = draw(st.integers(1, most))
    found: list[Block] = []
    for i in range(count):
        block = draw(blocks(i, alignments=alignments, gaps=gaps, pins=pins))
        found.append(replace(block, pinned=None) if any(clash(block, other) for other in found) else block)
    return Trace(tuple(found))


def meet(a: Block, b: Block) -> bool:
    """Whether two blocks are ever live together."""
    return any(s < f and e < t for s, t in a.pieces for e, f in b.pieces)


def clash(a: Block, b: Block) -> bool:
    """Whether two blocks that are ever live together are pinned to the same bytes."""
    if a.pinned is None or b.pinned is None:
        return False
    return meet(a, b) and a.pinned < b.pinned + b.nbytes and b.pinned < a.pinned + a.nbytes


def optimum(trace: Trace) -> int:
    """The smallest peak of any layout, where no pins clash."""
    every = trace.blocks
    offsets = {b.id: b.pinned for b in every if b.pinned is not None}
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


def tiling(blocks: int, draw: random.Random, side: int = 0) -> Trace:
    """A rectangle cut at random, again and again: a layout of its parts without a byte to spare."""
    side = side or 4 * blocks
    parts = [(0, side, 0, side)]
    while len(parts) < blocks:
        start, end, low, high = parts.pop(
            max(range(len(parts)), key=lambda i: parts[i][1] - parts[i][0] + draw.random())
        )
        if draw.random() < 0.5 and end - start > 1:
            cut = draw.randint(start + 1, end - 1)
            parts += [(start, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = draw.randint(low + 1, high - 1)
            parts += [(start, end, low, cut), (start, end, cut, high)]
        else:
            parts.append((start, end, low, high))
    draw.shuffle(parts)
    return Trace(tuple(Block(i, s, e, high - low) for i, (s, e, low, high) in enumerate(parts)))


def ragged(blocks: int, draw: random.Random) -> Trace:
    """A tiling whose blocks have lost some of their bytes and time: no layout of it is easy to find."""
    parts = (replace(b, start=64 * b.start, end=64 * b.end, nbytes=64 * b.nbytes) for b in tiling(blocks, draw).blocks)
    return Trace(
        tuple(
            replace(
                b, start=b.start + draw.randrange(8), end=b.end - draw.randrange(8), nbytes=b.nbytes - draw.randrange(8)
            )
            for b in parts
        )
    )
