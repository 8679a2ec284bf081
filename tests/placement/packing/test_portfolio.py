"""The portfolio: valid wherever a layout exists, it stops when it has what was asked, optimal on small problems."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.random_traces import traces
from tests.placement.packing.small_problems import instance, optimum
from tests.placement.packing.small_problems import traces as small_traces

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits
from overspill.placement.packing.bound import bound_bytes
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.portfolio import Portfolio

PATIENT = 1000.0


def peak(trace: Trace, solver: Portfolio, **limits: float) -> int:
    layout = solver.solve(trace, Limits(**limits)).layout  # type: ignore[arg-type]
    assert layout is not None
    return layout.peak_bytes


@settings(max_examples=40, deadline=None)
@given(trace=traces(count=16), capacity=st.one_of(st.none(), st.integers(1, 60)), seed=st.integers(0, 3))
def test_the_layout_is_valid_within_its_bound_and_the_same_each_time(
    trace: Trace, capacity: int | None, seed: int
) -> None:
    first, again = (Portfolio(restarts=12).solve(trace, Limits(capacity, PATIENT, seed)) for _ in range(2))
    assert first.layout is not None
    first.layout.validate(trace)
    assert first.bound_bytes <= first.layout.peak_bytes
    assert (first.layout, first.bound_bytes) == (again.layout, again.bound_bytes)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(trace=small_traces())
def test_of_small_problems_it_finds_the_optimum(trace: Trace) -> None:
    solution = Portfolio().solve(trace)
    assert solution.layout is not None
    best = optimum(trace)
    assert solution.bound_bytes <= best <= solution.layout.peak_bytes
    if all(block.alignment == 1 for block in trace.blocks):
        assert solution.layout.peak_bytes == best


@settings(max_examples=40, deadline=None)
@given(trace=traces())
def test_more_restarts_are_never_worse_and_the_bound_holds(trace: Trace) -> None:
    few, many = (peak(trace, Portfolio(restarts, exact_blocks=0), time_limit_seconds=PATIENT) for restarts in (0, 30))
    assert bound_bytes(Problem.of(trace)) <= many <= few


def test_restarts_find_what_the_first_runs_miss() -> None:
    rows = [(0, 6, 4), (2, 8, 3), (5, 9, 2), (1, 3, 5), (8, 12, 4), (3, 11, 1), (10, 12, 5), (0, 2, 3), (6, 10, 3)]
    trace = Trace(tuple(Block(i, *row) for i, row in enumerate(rows)))
    assert (
        peak(trace, Portfolio(restarts=0, exact_blocks=0))
        >= peak(trace, Portfolio(restarts=50, exact_blocks=0))
        == trace.lower_bound_bytes
    )


def test_the_exact_search_ends_what_the_heuristics_leave_above_the_bound() -> None:
    trace = instance("K")
    rough = Portfolio(restarts=4, exact_blocks=0).solve(trace)
    assert not rough.optimal
    assert Portfolio().solve(trace).optimal


def test_it_stops_at_the_capacity_that_was_asked_for() -> None:
    trace = Trace(tuple(Block(i, i % 7, i % 7 + 1 + i % 5, 1 + i % 4) for i in range(40)))
    enough = peak(trace, Portfolio(restarts=0, exact_blocks=0), capacity_bytes=1000)
    assert enough <= 1000
    assert (
        peak(trace, Portfolio(restarts=10**9, exact_blocks=0), capacity_bytes=enough) <= enough
    )  # else it would not end


def test_the_time_limit_ends_the_restarts_but_never_without_a_layout() -> None:
    trace = Trace((Block(0, 0, 2, 1, alignment=2), Block(1, 1, 3, 1, alignment=3), Block(2, 0, 3, 1, pinned=7)))
    assert peak(trace, Portfolio(restarts=10**9, exact_blocks=0), capacity_bytes=1, time_limit_seconds=0.01) == 8


def test_with_one_alignment_the_bound_counts_rounded_sizes() -> None:
    solution = Portfolio().solve(Trace(tuple(Block(i, 0, 1, 5, alignment=8) for i in range(3))))
    assert solution.bound_bytes == 21
    assert solution.optimal


def test_pinned_blocks_that_lie_on_one_another_are_refused() -> None:
    with pytest.raises(RequestError, match="pinned"):
        Portfolio().solve(Trace((Block(0, 0, 1, 2, pinned=0), Block(1, 0, 1, 2, pinned=1))))
