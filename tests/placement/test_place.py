"""A trace under anything that places, and plans that lie within their budget where they are placed."""

from __future__ import annotations

import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Block, Trace
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.placement.card import PoolAccount
from overspill.placement.packing import SOLVERS, Limits
from overspill.placement.place import PLACERS, check_placer, place, place_plan
from overspill.plans.fit import search
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.simulate import trace_of

MIB = 1 << 20
STEP = network([Layer(3 * MIB + 512 * i) for i in range(8)])
TRACE = trace_of(STEP, make_plan(STEP, DEVICE, "vdnn-all", 1 << 40).schedule)


@pytest.mark.parametrize("placer", PLACERS)
def test_everything_that_places_takes_at_least_the_live_bytes(placer: str) -> None:
    placed = place(TRACE, placer, Limits(time_limit_seconds=0.2))
    assert placed.placer == placer
    assert placed.peak_bytes >= placed.lower_bound_bytes == TRACE.lower_bound_bytes
    assert 0 <= placed.fragmentation < 1
    assert (placed.unusable is None) == (placer in SOLVERS)


def test_a_hole_too_small_for_the_largest_block_is_unusable() -> None:
    """The pool grows to 6 MiB for blocks of 2 MiB, keeps one of them, and 2 MiB are free on each side of it."""
    blocks = [Block(i, 0, 2 if i == 1 else 1, 2 * MIB) for i in range(3)]
    placed = place(Trace((*blocks, Block(3, 2, 3, 6 * MIB))), "best-fit")
    assert placed.unusable is not None
    assert placed.unusable > 0


def test_planned_addresses_are_those_of_the_whole_step_though_its_layers_repeat() -> None:
    """Found by their repetition alone, four layers would be four steps, and take a fifth more."""
    layers = [(k, 2 + k * 7 % 13) for _ in range(4) for k in range(10)]
    blocks = [Block(t, t, 80 - t if k == 3 else t + 2, size * MIB) for t, (k, size) in enumerate(layers)]
    placed = place(Trace(tuple(blocks)), "planned")
    assert placed.peak_bytes <= 1.02 * placed.lower_bound_bytes


def test_an_unknown_placer_is_refused_with_those_that_exist() -> None:
    with pytest.raises(RequestError, match=r"'pytroch'.*best-fit, buddy"):
        check_placer("pytroch")


@pytest.mark.parametrize("placer", ["pytorch", "tensorflow", "best-fit", "chunked", "skyline", "portfolio"])
def test_a_plan_lies_within_its_budget_where_it_is_placed(placer: str) -> None:
    budget = int(0.9 * place(trace_of(STEP, make_plan(STEP, DEVICE, "liveness", 1 << 40).schedule), placer).peak_bytes)
    found = search(STEP, PoolAccount(DEVICE, placer), "auto", budget).plan()
    assert found.peak_bytes <= place_plan(found, placer).peak_bytes == found.needed_bytes <= budget == found.asked_bytes


def test_a_budget_that_only_live_bytes_keep_is_planned_again_for_less() -> None:
    """Under PyTorch's allocator a step takes more than its live bytes: with those as the budget, something must go."""
    live = unmanaged_peak(STEP, DEVICE)
    assert make_plan(STEP, DEVICE, "auto", live).offloaded_bytes == 0
    found = search(STEP, PoolAccount(DEVICE, "pytorch"), "auto", live).plan()
    assert found.offloaded_bytes > 0 or found.recomputed_ops > 0
    assert place_plan(found).peak_bytes <= live


def test_what_no_plan_can_be_placed_in_is_infeasible_with_the_least_that_was() -> None:
    live = unmanaged_peak(STEP, DEVICE)
    with pytest.raises(InfeasibleBudgetError, match="no plan of") as error:
        search(STEP, PoolAccount(DEVICE, "pytorch"), "liveness", live).plan()
    assert error.value.floor_bytes > live
