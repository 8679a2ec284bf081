"""Greedy placement: first and best fit by each key, with alignment, pins and gaps, each as its definition says."""

import numpy as np
import pytest
from hypothesis import given, settings
from tests.placement.packing import naive
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.keys import KEYS, conflicts, highest_load, order_by
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.greedy import Greedy


def greedy(key: str = "size", fit: str = "first") -> Greedy:
    return Greedy(key, fit)  # type: ignore[arg-type]


def solved(trace: Trace, solver: Greedy) -> tuple[int, ...]:
    layout = solver.solve(trace).layout
    assert layout is not None
    return layout.offsets


def test_no_blocks_need_no_bytes() -> None:
    assert solved(Trace(()), greedy()) == ()


# In section 1 blocks 0, 2 and 4 leave a hole of 3 bytes at 3 and one of 2 at 8.
HOLES = (
    Block(0, 0, 2, 3, pinned=0),
    Block(1, 1, 2, 2),
    Block(2, 0, 2, 2, pinned=6),
    Block(3, 0, 1, 1),
    Block(4, 0, 2, 1, pinned=10),
)


def test_first_fit_takes_the_lowest_hole() -> None:
    assert solved(Trace(HOLES), greedy())[1] == 3


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_equal_ones() -> None:
    assert solved(Trace(HOLES), greedy(fit="best"))[1] == 8
    assert solved(Trace((*HOLES, Block(5, 1, 2, 1, pinned=5))), greedy(fit="best"))[1] == 3


def test_the_room_above_all_is_the_last_resort() -> None:
    trace = Trace((Block(0, 0, 1, 1, pinned=90), Block(1, 0, 1, 5)))
    assert solved(trace, greedy(fit="best")) == (90, 0)
    assert solved(Trace((Block(0, 0, 1, 1, pinned=4), Block(1, 0, 1, 5))), greedy(fit="best")) == (4, 5)


def test_an_aligned_block_skips_a_hole_that_is_too_small_once_aligned() -> None:
    trace = Trace((Block(0, 0, 1, 1, pinned=0), Block(1, 0, 1, 4, pinned=6), Block(2, 0, 1, 4, alignment=4)))
    for fit in ("first", "best"):
        assert solved(trace, greedy(fit=fit)) == (0, 6, 12)


def test_a_block_lives_in_the_gap_of_another() -> None:
    trace = Trace((Block(0, 0, 6, 4, gaps=((2, 4),)), Block(1, 2, 4, 4), Block(2, 3, 5, 1)))
    assert solved(trace, greedy()) == (0, 0, 4)


@pytest.mark.parametrize("fit", ["first", "best"])
@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=8, deadline=None)
@given(trace=traces())
def test_it_places_as_the_definition_says(key: str, fit: str, trace: Trace) -> None:
    problem = Problem.of(trace)
    order = problem.index[order_by(KEYS[key](problem).astype(np.float64))]
    assert solved(trace, greedy(key, fit)) == naive.greedy(trace, order.tolist(), fit)


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_conflicts_and_loads_are_those_of_the_definition(trace: Trace) -> None:
    problem = Problem.of(trace)
    lives = list(zip(problem.start.tolist(), problem.end.tolist(), strict=True))
    assert conflicts(problem).tolist() == [sum(a < d and c < b for c, d in lives) - 1 for a, b in lives]
    assert highest_load(problem).tolist() == [max(problem.load[a:b].tolist()) for a, b in lives]


def test_pinned_blocks_that_lie_on_one_another_are_refused() -> None:
    trace = Trace((Block(0, 0, 4, 4, pinned=0), Block(1, 8, 9, 4, pinned=0), Block(2, 3, 5, 4, pinned=2)))
    with pytest.raises(RequestError, match=r"0 and 2 .*pinned"):
        greedy().solve(trace)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'colour' .*'first'"):
        greedy("colour")
    with pytest.raises(RequestError, match="by 'worst' fit"):
        greedy(fit="worst")


def test_the_name_tells_the_fit_and_the_key() -> None:
    assert Greedy("lifetime", "best").name == "best-fit-lifetime"
