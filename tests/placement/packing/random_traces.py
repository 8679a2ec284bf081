"""Small random traces for the tests of the offline solvers."""

from __future__ import annotations

from hypothesis import strategies as st

from overspill.core import Block, Trace


@st.composite
def blocks(draw: st.DrawFn, index: int, *, gaps: bool = True, alignments: tuple[int, ...] = (1, 1, 2, 3, 4)) -> Block:
    """A block with one of the alignments and perhaps a gap."""
    start, length = draw(st.integers(0, 20)), draw(st.integers(1, 12))
    edge = st.integers(start, start + length)
    gap = tuple(sorted(draw(st.tuples(edge, edge))))
    return Block(
        index,
        start,
        start + length,
        draw(st.integers(1, 9)),
        alignment=draw(st.sampled_from(alignments)),
        gaps=draw(st.sampled_from([(), (), (gap,)])) if gaps else (),
    )


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    count: int = 25,
    gaps: bool = True,
    pins: bool = True,
    alignments: tuple[int, ...] = (1, 2, 3, 4),
) -> Trace:
    """Up to `count` blocks; the first may be pinned."""
    found = [draw(blocks(i, gaps=gaps, alignments=alignments)) for i in range(draw(st.integers(0, count)))]
    if pins and found and draw(st.booleans()):
        first = found[0]
        address = first.alignment * draw(st.integers(0, 5))
        found[0] = Block(0, first.start, first.end, first.nbytes, alignment=first.alignment, pinned=address)
    return Trace(tuple(found))
