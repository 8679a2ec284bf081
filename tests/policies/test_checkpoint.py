"""`checkpoint-cost`: segments by bytes, the cheapest first, as few seconds as the budget allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.policies.plans import floor_bytes, larger_budgets_are_kept_and_never_slower, moves, seconds_of
from tests.simulate.graphs import DEVICE, Layer, devices, network, networks

from overspill.core import Device, Graph, LayerType, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.plans.plan import unmanaged_peak
from overspill.policies.checkpoint import Checkpoint, CheckpointCost
from overspill.simulate import check

EXAMPLES = settings(max_examples=20, deadline=None)
# Ops 0 to 7 make y0 to y7, 8 and 9 are the loss, 10 to 17 the backward of l7 to l0, which reads the layer's input.
CHAIN = network([Layer(10_000) for _ in range(8)])
PEAK = 8192 + 4 + 90_000


@pytest.mark.parametrize(
    ("short", "recomputed"),
    [
        (0, []),
        (10_000, ["16 recompute l0"]),
        (20_000, ["14 recompute l2", "16 recompute l0"]),
        (30_000, ["14 recompute l0", "14 recompute l1", "14 recompute l2"]),
    ],
)
def test_it_recomputes_no_more_than_the_budget_demands(short: int, recomputed: list[str]) -> None:
    assert moves(CHAIN, CheckpointCost().plan(CHAIN, DEVICE, PEAK - short)) == recomputed


def test_it_drops_what_costs_least_for_its_bytes() -> None:
    dear = Layer(10_000, LayerType.CONV, flops=10**9)
    graph = network([dear, dear, dear, dear, *[Layer(10_000, flops=10)] * 4, dear, dear, dear, dear])
    made = CheckpointCost().plan(graph, DEVICE, unmanaged_peak(graph, DEVICE) - 10_000)
    assert {graph.ops[op].layer for op in made.targets(Verb.RECOMPUTE)} <= {"l4", "l5", "l6", "l7"}


def test_below_the_floor_it_names_it() -> None:
    floor = floor_bytes(CheckpointCost(), CHAIN, DEVICE)
    assert check(CHAIN, CheckpointCost().plan(CHAIN, DEVICE, floor)).peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError) as caught:
        CheckpointCost().plan(CHAIN, DEVICE, floor - 1)
    assert caught.value.floor_bytes == floor
    assert "checkpoint-cost" in str(caught.value)


def test_where_checkpoint_fits_a_deep_chain_it_is_no_slower() -> None:
    graph = network([Layer(10_000, flops=10**6) for _ in range(36)])
    by_root = Checkpoint().plan(graph, DEVICE)
    by_cost = CheckpointCost().plan(graph, DEVICE, check(graph, by_root).peak_bytes)
    assert seconds_of(graph, by_cost, DEVICE) <= seconds_of(graph, by_root, DEVICE)


@given(networks(), devices())
@EXAMPLES
def test_larger_budgets_are_kept_and_never_slower(graph: Graph, device: Device) -> None:
    larger_budgets_are_kept_and_never_slower(CheckpointCost(), graph, device)


@given(networks())
@EXAMPLES
def test_with_room_for_everything_nothing_is_recomputed(graph: Graph) -> None:
    for budget in (unmanaged_peak(graph, DEVICE), None):
        assert set(CheckpointCost().plan(graph, DEVICE, budget).counts) <= {Verb.RUN, Verb.FREE}


@given(networks())
@EXAMPLES
def test_each_op_is_recomputed_at_most_once(graph: Graph) -> None:
    rematerialized = (
        CheckpointCost().plan(graph, DEVICE, floor_bytes(CheckpointCost(), graph, DEVICE)).targets(Verb.RECOMPUTE)
    )
    assert len(rematerialized) == len(set(rematerialized))
