"""The skyline heuristic: the rules of the paper, its guarded form, and a naive one beside it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing import naive
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits
from overspill.placement.packing.keys import KEYS, maximal_sections
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.skyline import Skyline, packer_of, solid

PLAIN = traces(count=30, gaps=False, pins=False)
UNALIGNED = traces(count=30, gaps=False, pins=False, alignments=(1,))


def trace_of(rows: list[tuple[int, int, int]]) -> Trace:
    """Blocks of (start, lifetime, bytes)."""
    return Trace(tuple(Block(i, s, s + d, n) for i, (s, d, n) in enumerate(rows)))


def solved(trace: Trace, solver: Skyline, limits: Limits | None = None) -> tuple[int, ...]:
    layout = solver.solve(trace, limits).layout
    assert layout is not None
    return layout.offsets


def skyline(key: str = "lifetime", *, guarded: bool = False) -> Skyline:
    return Skyline(key, guarded=guarded)


def test_no_blocks_need_no_bytes() -> None:
    assert solved(Trace(()), skyline()) == ()


def test_the_longest_life_lies_lowest() -> None:
    assert solved(trace_of([(0, 1, 5), (0, 3, 1), (1, 2, 1)]), skyline()) == (1, 0, 1)


def test_of_equally_low_lines_the_leftmost_is_first() -> None:
    # After the block in the middle both sides are at 0; block 1 of the left one is placed before block 2 spans above it.
    trace = trace_of([(3, 4, 2), (0, 3, 2), (0, 10, 1), (7, 3, 2)])
    assert solved(trace, skyline("size")) == (0, 0, 2, 0)


def test_a_line_on_which_nothing_fits_is_lifted_to_its_lower_neighbour_and_merged() -> None:
    # Between walls of 5 and 2 bytes nothing fits: the gap [2, 4) rises to 2 and joins the right wall.
    trace = trace_of([(0, 2, 5), (4, 4, 2), (2, 5, 1)])
    assert solved(trace, skyline("size")) == (0, 0, 2)


def test_lines_of_one_height_are_one_line() -> None:
    trace = trace_of([(0, 2, 3), (2, 2, 3), (0, 4, 1)])
    assert solved(trace, skyline("size")) == (0, 0, 3)


def test_the_guard_does_not_strand_a_section_that_is_full() -> None:
    # Section 2 holds 6 bytes, all of the capacity. Block 2 would fill it to 3 bytes, but block 0 already lies there.
    trace = trace_of([(2, 1, 3), (0, 1, 3), (1, 2, 3), (0, 2, 3)])
    assert solved(trace, skyline("size")) == (0, 0, 3, 6)
    assert solved(trace, skyline("size", guarded=True)) == (0, 3, 3, 0)


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=15, deadline=None)
@given(trace=UNALIGNED)
def test_it_places_as_the_paper_says(key: str, trace: Trace) -> None:
    filled = solid(Problem.of(trace))
    assert solved(trace, Skyline(key)) == naive.skyline(filled, KEYS[key](filled).tolist())


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=15, deadline=None)
@given(trace=PLAIN, capacity=st.one_of(st.none(), st.integers(1, 60)))
def test_a_guarded_layout_is_valid_and_the_same_each_time(key: str, trace: Trace, capacity: int | None) -> None:
    limits = Limits(capacity_bytes=capacity)
    first, again = (Skyline(key, guarded=True).solve(trace, limits).layout for _ in range(2))
    assert first is not None
    first.validate(trace)
    assert first == again


@settings(max_examples=30, deadline=None)
@given(trace=PLAIN, limit=st.integers(0, 60))
def test_a_run_ends_once_a_block_ends_above_the_limit(trace: Trace, limit: int) -> None:
    filled = solid(Problem.of(trace))
    key = np.random.default_rng(0).random(len(filled))
    packer = packer_of(filled)
    for capacity in (None, 0):
        whole = packer.pack(key, capacity, None)
        assert whole is not None
        assert (packer.pack(key, capacity, limit) is None) == (filled.peak_bytes(whole) > limit)


@settings(max_examples=60, deadline=None)
@given(trace=PLAIN)
def test_maximal_sections_keep_who_meets_whom_and_none_is_within_another(trace: Trace) -> None:
    problem = Problem.of(trace)
    start, end = maximal_sections(problem)

    def meets(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a[:, None] < b[None, :]) & (a[None, :] < b[:, None])

    assert (meets(start, end) == meets(problem.start, problem.end)).all()
    live = [frozenset(np.flatnonzero((start <= t) & (t < end)).tolist()) for t in range(end.max(initial=0))]
    assert not any(a <= b for a in live for b in live if a is not b)


def test_many_blocks_are_placed_as_the_paper_says() -> None:
    random = np.random.default_rng(0)
    starts, lives, sizes = (
        random.integers(60, size=90),
        random.integers(1, 30, size=90),
        random.integers(1, 99, size=90),
    )
    trace = trace_of(list(zip(starts.tolist(), lives.tolist(), sizes.tolist(), strict=True)))
    filled = solid(Problem.of(trace))
    assert solved(trace, Skyline("load")) == naive.skyline(filled, KEYS["load"](filled).tolist())


def test_blocks_hold_their_place_in_their_gaps() -> None:
    trace = Trace((Block(0, 0, 6, 4, gaps=((2, 4),)), Block(1, 2, 4, 4)))
    assert solved(trace, skyline()) == (0, 4)


def test_pinned_blocks_and_unknown_keys_are_refused() -> None:
    with pytest.raises(RequestError, match="pinned blocks"):
        skyline().solve(Trace((Block(0, 0, 1, 1, pinned=0),)))
    with pytest.raises(RequestError, match=r"'colour'; .*size"):
        skyline("colour")
