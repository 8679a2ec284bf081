"""Whether a layout keeps to a capacity, and the fewest blocks that are to blame where none can, against a naive search."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.first_fit import FirstFit

from overspill.core import Block, Layout, Trace
from overspill.placement.packing.base import Solution
from overspill.placement.packing.verdict import PackingVerdict, crowd_above, space_peaks, verdict

sizes = st.integers(1, 20)
traces = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), sizes, st.sampled_from([0, 0, 1])), max_size=7).map(
    lambda rows: Trace(tuple(Block(i, at, at + life, size, space=s) for i, (at, life, size, s) in enumerate(rows)))
)


def together(blocks: tuple[Block, ...], capacity: int) -> bool:
    """Whether there is a time at which all blocks, of one space, are live with more bytes than the capacity."""
    alive = max(b.start for b in blocks) < min(b.end for b in blocks)
    return alive and len({b.space for b in blocks}) == 1 and sum(b.nbytes for b in blocks) > capacity


@given(traces, st.integers(0, 60))
@settings(max_examples=100)
def test_the_crowd_is_a_smallest_set_that_exceeds_the_capacity_at_one_time(trace: Trace, capacity: int) -> None:
    crowd = crowd_above(trace, capacity)
    counts = range(1, len(trace.blocks) + 1)
    sets = (found for count in counts for found in combinations(trace.blocks, count) if together(found, capacity))
    least = next(sets, ())
    assert len(crowd) == len(least)
    assert not crowd or together(tuple(trace.blocks[i] for i in crowd), capacity)


def test_a_block_is_no_crowd_in_its_gap_and_a_pin_beyond_the_capacity_is_one() -> None:
    apart = Trace((Block(0, 0, 9, 10, gaps=((3, 5),)), Block(1, 3, 5, 10)))
    assert crowd_above(apart, 10) == ()
    assert crowd_above(apart, 9) == (0,)
    assert crowd_above(Trace((Block(0, 0, 9, 10), Block(1, 0, 9, 10, pinned=90))), 99) == (1,)


PAIR = Trace((Block(0, 0, 2, 10), Block(1, 1, 3, 20)))


def test_a_layout_within_the_capacity_fits_and_one_above_is_not_yet_proof() -> None:
    loose = Solution(Layout("s", (0, 30), 50, 30), 30, 0.1)
    assert verdict(PAIR, loose, None) == verdict(PAIR, loose, 50) == PackingVerdict(fits=True, infeasible=False)
    assert verdict(PAIR, loose, 49) == PackingVerdict(fits=False, infeasible=False)
    assert verdict(PAIR, loose, 29) == PackingVerdict(fits=False, infeasible=True, infeasible_core=(0, 1))


def test_a_bound_or_a_blame_above_the_capacity_is_proof() -> None:
    none = Solution(None, 40, 0.1)
    assert verdict(PAIR, none, None) == PackingVerdict(fits=False, infeasible=False)
    assert verdict(PAIR, none, 35) == PackingVerdict(fits=False, infeasible=True)
    assert verdict(PAIR, Solution(None, 30, 0.1, (0, 1)), None) == PackingVerdict(
        fits=False, infeasible=True, infeasible_core=(0, 1)
    )
    assert verdict(PAIR, Solution(None, 30, 0.1, (0, 1)), 15).infeasible_core == (1,)


def test_every_space_may_take_the_whole_capacity() -> None:
    trace = Trace((Block(0, 0, 2, 10), Block(1, 0, 2, 20, space=1)))
    solution = FirstFit().solve(trace)
    assert solution.layout is not None
    assert space_peaks(trace, solution.layout.offsets) == {0: 10, 1: 20}
    assert verdict(trace, solution, 20).fits
    assert verdict(trace, solution, 19) == PackingVerdict(fits=False, infeasible=True, infeasible_core=(1,))
