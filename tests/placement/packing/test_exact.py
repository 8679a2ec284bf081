"""The exact solver finds the optimum, proves what does not fit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.small_problems import instance, optimum, tiling, traces

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits, Solution
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers import exact as exact_module
from overspill.placement.packing.solvers.exact import Exact, turn
from overspill.placement.packing.solvers.exact_model import ExactModel

CAPACITY = 1048576


def solve(trace: Trace, capacity: int | None = None, *, seconds: float = 60.0) -> Solution:
    return Exact().solve(trace, Limits(capacity, seconds))


def some(trace: Trace, positions: tuple[int, ...]) -> Trace:
    return Trace(tuple(trace.blocks[i] for i in positions))


@settings(max_examples=150, deadline=None)
@given(traces())
def test_it_finds_the_optimum_of_small_problems_and_proves_it(trace: Trace) -> None:
    best, found = optimum(trace), solve(trace)
    assert found.layout is not None
    assert found.layout.peak_bytes == best == found.bound_bytes


@settings(max_examples=100, deadline=None)
@given(traces(), st.integers(-3, 3))
def test_it_decides_a_capacity_and_blames_a_set_without_which_the_rest_fits(trace: Trace, spare: int) -> None:
    best = optimum(trace)
    capacity = max(best + spare, 0)
    found = solve(trace, capacity)
    assert found.layout is not None
    if capacity >= best:
        assert found.layout.peak_bytes <= capacity
        assert found.infeasible_core == ()
        return
    assert found.bound_bytes <= best
    assert found.bound_bytes > capacity or trace.lower_bound_bytes > capacity
    assert optimum(some(trace, found.infeasible_core)) > capacity
    for left_out in found.infeasible_core:
        rest = tuple(i for i in found.infeasible_core if i != left_out)
        assert optimum(some(trace, rest)) <= capacity


@pytest.mark.parametrize("alignment", [1, 512])
def test_sizes_that_are_multiples_of_a_unit_change_no_answer(alignment: int) -> None:
    small = Trace(tuple(Block(i, s, e, n) for i, (s, e, n) in enumerate([(0, 2, 3), (1, 4, 2), (3, 5, 3), (0, 5, 1)])))
    large = Trace(tuple(Block(b.id, b.start, b.end, b.nbytes * 512, alignment=alignment) for b in small.blocks))
    assert ExactModel.of(Problem.of(large)).unit == 512
    assert solve(large).bound_bytes == 512 * solve(small).bound_bytes


def test_only_sections_with_a_maximal_set_of_live_blocks_are_kept() -> None:
    stairs = Trace(tuple(Block(i, i, 20 - i, 1) for i in range(8)))
    assert ExactModel.of(Problem.of(stairs)).sections == 1


@pytest.mark.parametrize("seed", range(3))
def test_it_solves_tilings_without_a_byte_to_spare(seed: int) -> None:
    trace = tiling(150, random.Random(seed))
    found = solve(trace)
    assert found.layout is not None
    assert found.layout.peak_bytes == trace.lower_bound_bytes == 600


@pytest.mark.parametrize("name", ["C", "J", "K"])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_solves_challenging_instances_in_any_order_of_rows(name: str, seed: int) -> None:
    blocks = list(instance(name).blocks)
    random.Random(seed).shuffle(blocks)
    found = Exact().solve(Trace(tuple(blocks)), Limits(CAPACITY, 60.0, seed))
    assert found.layout is not None
    assert found.layout.peak_bytes <= CAPACITY


def test_an_optimum_that_meets_the_lower_bound_is_proven() -> None:
    assert solve(instance("C")).optimal


def test_a_time_limit_ends_with_a_layout_and_the_best_bound() -> None:
    trace = instance("J")
    found = solve(trace, seconds=0.05)
    assert found.layout is not None
    assert trace.lower_bound_bytes <= found.bound_bytes <= found.layout.peak_bytes


def test_a_capacity_that_is_not_decided_in_time_blames_nobody() -> None:
    found = solve(instance("J"), 989184, seconds=0.05)
    assert found.layout is not None
    assert found.layout.peak_bytes > 989184
    assert found.infeasible_core == ()


def test_a_section_that_is_too_full_is_to_blame_without_a_search() -> None:
    trace = Trace((Block(0, 0, 2, 5), Block(1, 1, 3, 6), Block(2, 1, 2, 1), Block(3, 2, 4, 7)))
    assert solve(trace, 12).infeasible_core == (1, 3)
    assert solve(trace, 6).infeasible_core == (3,)


def test_pins_that_clash_are_refused() -> None:
    with pytest.raises(RequestError, match=r"0 and 1 .*pinned"):
        solve(Trace((Block(0, 0, 4, 4, pinned=0), Block(1, 3, 5, 4, pinned=2), Block(2, 0, 9, 1))))


def test_the_same_seed_gives_the_same_layout() -> None:
    first, second = (solve(instance("K"), CAPACITY).layout for _ in range(2))
    assert first == second


def test_too_many_pairs_are_refused_before_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_module, "PAIR_LIMIT", 10)
    with pytest.raises(RequestError, match="'portfolio' takes them"):
        solve(Trace(tuple(Block(i, 0, 1, 1) for i in range(4))))


def test_an_empty_trace_is_solved() -> None:
    found = solve(Trace(()))
    assert found.optimal
    assert found.bound_bytes == 0


def test_turns_take_more_nodes_over_time_and_repeat_with_the_seed() -> None:
    first, again = ([*turn(2, 10, np.random.default_rng(seed))] for seed in (1, 1))
    assert all(np.array_equal(a.noise, b.noise) for a, b in zip(first, again, strict=True))
    assert [plan.node_limit for plan in first] == [80] * 3 + [20, 20, 40, 20, 20, 40, 80]
