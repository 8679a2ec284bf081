"""The bound from windows: at most the optimum, at least the bound that it starts from."""

import time

import pytest
from hypothesis import given, settings
from tests.placement.packing.small_problems import optimum, traces

from overspill.core import Block, Trace
from overspill.placement.packing.bound import bound_bytes
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.portfolio import Portfolio
from overspill.placement.packing.solvers.window_bound import window_bound

# (start, end, size) of the large blocks of a stretch of DenseNet-121's forward pass under Dymem's policy, in 3 211 264 bytes
TIGHT = (
    *((0, 2, 1), (0, 2, 8), (0, 4, 2), (0, 5, 4), (0, 7, 4), (0, 8, 2), (0, 8, 3), (0, 8, 4), (0, 9, 4), (1, 10, 6)),
    *((2, 3, 6), (2, 10, 6), (3, 10, 4), (4, 6, 4), (5, 10, 4), (6, 8, 1), (7, 10, 7), (8, 10, 7), (9, 10, 7)),
)


def bound(problem: Problem) -> int:
    return window_bound(problem, bound_bytes(problem), time.perf_counter() + 1000)


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_no_layout_is_below_the_bound_and_it_is_never_lower_than_before(trace: Trace) -> None:
    problem = Problem.of(trace)
    assert bound_bytes(problem) <= bound(problem) <= optimum(trace)


@pytest.mark.parametrize("gap", [(), ((2, 3),)])
def test_it_rises_where_a_short_window_of_large_blocks_cannot_be_packed(gap: tuple[tuple[int, int], ...]) -> None:
    tight = [Block(i, 30 + start, 30 + end, size) for i, (start, end, size) in enumerate(TIGHT)]
    rest = (Block(i, i - 40, i - 35, 3) for i in range(100, 150))
    trace = Trace((*tight, Block(50, 0, 200, 5), Block(51, 1, 6, 9, gaps=gap), *rest))
    before = bound_bytes(Problem.of(trace))
    solution = Portfolio().solve(trace)
    assert bound(Problem.of(trace)) == before + 1 == solution.bound_bytes
    assert solution.optimal
