"""`lms`: distances on topological levels, the two hyperparameters by hand, and their tuning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import (
    faster_links_are_never_slower,
    floor_bytes,
    larger_budgets_are_kept_and_never_slower,
    moves,
    seconds_of,
    with_moving_state,
)
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.core import Device, Graph, Phase, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import unmanaged_peak
from overspill_papers.policies.lms import LargeModelSupport, levels, swap_in, swapped

EXAMPLES = settings(max_examples=20, deadline=None)
# Ops 0 to 3 make y0 to y3, 4 and 5 are the loss, 6 to 9 the backward of l3 to l0, which reads the layer's input.
CHAIN = network([Layer(10_000) for _ in range(4)])
FORWARD_PEAK = 8192 + 4 + 40_000  # what the end of forward needs
PEAK = FORWARD_PEAK + 10_000  # what the first two steps of backward need with everything there


def away(graph: Graph, threshold: int) -> list[tuple[str, int, int]]:
    """What is swapped at `threshold`: names, and the steps between which."""
    depths = np.array([*levels(graph), max(levels(graph)) + 1])
    gaps = swapped(StepProgram(graph), depths, threshold)
    return [(graph.tensors[gap.tensor].name, gap.start, gap.end) for gap in gaps]


def test_a_level_is_the_longest_chain_before_an_op() -> None:
    build = Build()
    a, b, c, d = (build.tensor(4000) for _ in range(4))
    build.op([], [a])
    build.op([a], [b])
    build.op([a], [c])  # a branch beside the one before
    build.op([a, b, c], [d])
    assert levels(build.graph()) == (0, 1, 1, 2)


def test_an_op_that_writes_in_place_waits_for_the_readers_before_it() -> None:
    build = Build()
    a, b, c = (build.tensor(4000) for _ in range(3))
    build.op([], [a])
    build.op([a], [b])
    build.op([b], [c])
    build.op([a], [a])
    build.op([a], [b])
    assert levels(build.graph()) == (0, 1, 2, 2, 3)


@given(networks())
@EXAMPLES
def test_whoever_reads_a_tensor_is_above_its_maker(graph: Graph) -> None:
    found = levels(graph)
    for tensor, maker in graph.producer.items():
        assert all(found[reader] > found[maker] for reader in graph.consumers[tensor] if reader != maker)


@pytest.mark.parametrize(
    ("threshold", "names"),
    [(2, ["y0", "y1", "y2"]), (3, ["y0", "y1"]), (4, ["y0", "y1"]), (5, ["y0"]), (6, ["y0"]), (7, [])],
)
def test_what_is_used_again_beyond_the_threshold_is_swapped(threshold: int, names: list[str]) -> None:
    # y0 is read at level 1 and 8, y1 at 2 and 7, y2 at 3 and 6.
    assert [name for name, _, _ in away(CHAIN, threshold)] == names


def test_a_tensor_may_be_swapped_between_any_two_uses() -> None:
    graph = network([Layer(10_000), Layer(10_000), Layer(10_000), Layer(10_000), Layer(10_000, skips=(0,))])
    assert ("y0", 1, 4) in away(graph, 2)  # within forward, before the skip connection
    assert ("y0", 4, 7) in away(graph, 2)


@pytest.mark.parametrize(("ahead", "step"), [(0, 8), (1, 7), (2, 6), (3, 5), (4, 5), (100, 5)])
def test_a_swap_in_starts_before_the_op_that_far_ahead_but_not_in_forward(ahead: int, step: int) -> None:
    program = StepProgram(CHAIN)
    depths = np.array([*levels(CHAIN), 10])
    gap = next(gap for gap in program.gaps if (gap.start, gap.end) == (1, 8))
    assert swap_in(program, depths, gap, ahead) == step


def test_the_hyperparameters_give_the_schedule() -> None:
    made = LargeModelSupport(threshold=3, ahead=1).plan(CHAIN, DEVICE, FORWARD_PEAK)
    assert moves(CHAIN, made) == [
        "2 offload y0", "3 offload y1", "5 await_offload y0", "5 await_offload y1",
        "6 prefetch y1", "7 prefetch y0", "7 await_prefetch y1", "8 await_prefetch y0",
    ]  # fmt: skip


def test_memory_is_awaited_where_it_is_needed_the_oldest_first() -> None:
    made = LargeModelSupport(threshold=2, ahead=0).plan(CHAIN, DEVICE, 8192 + 4 + 30_000)
    waits = [move for move in moves(CHAIN, made) if "await_offload" in move]
    assert waits == ["3 await_offload y0", "5 await_offload y1", "5 await_offload y2"]


def test_hyperparameters_that_need_more_say_how_much() -> None:
    policy = LargeModelSupport(threshold=2, ahead=3)
    with pytest.raises(InfeasibleBudgetError) as caught:
        policy.plan(CHAIN, DEVICE, FORWARD_PEAK)
    assert caught.value.floor_bytes == PEAK
    assert policy.plan(CHAIN, DEVICE, PEAK).counts[Verb.OFFLOAD] == 0


def test_the_least_that_tuning_reaches_is_the_floor_of_all_policies_on_a_chain() -> None:
    assert floor_bytes(LargeModelSupport(), CHAIN, DEVICE) == floor_of(StepProgram(CHAIN)).nbytes


def test_tuning_finds_no_slower_schedule_than_its_grid_has() -> None:
    graph = network([Layer(10_000, flops=10**7) for _ in range(12)])
    budget = (floor_of(StepProgram(graph)).nbytes + unmanaged_peak(graph, DEVICE)) // 2
    tuned = seconds_of(graph, LargeModelSupport().plan(graph, DEVICE, budget), DEVICE)
    for threshold in (0, 6, 12):
        by_hand = LargeModelSupport(threshold=threshold, ahead=2).plan(graph, DEVICE, budget)
        assert tuned <= seconds_of(graph, by_hand, DEVICE) * (1 + 1e-9)


def test_variables_stay_even_where_they_could_move() -> None:
    graph = with_moving_state(network([Layer(10_000, weight_bytes=20_000) for _ in range(4)]))
    made = LargeModelSupport().plan(graph, DEVICE, floor_bytes(LargeModelSupport(), graph, DEVICE))
    assert made.stored == ()
    assert made.counts[Verb.OFFLOAD]
    assert not any(graph.tensors[t].persistent for t in made.targets(Verb.OFFLOAD))


@given(networks(), devices())
@EXAMPLES
def test_larger_budgets_are_kept_and_never_slower(graph: Graph, device: Device) -> None:
    larger_budgets_are_kept_and_never_slower(LargeModelSupport(), graph, device)


@given(networks(), devices(), st.sampled_from([0.0, 0.3, 0.7]))
@EXAMPLES
def test_faster_links_are_never_slower(graph: Graph, device: Device, share: float) -> None:
    floor = floor_bytes(LargeModelSupport(), graph, device)
    budget = floor + int(share * max(0, unmanaged_peak(graph, device) - floor))
    faster_links_are_never_slower(LargeModelSupport(), graph, device, budget)


@given(networks())
@EXAMPLES
def test_with_room_for_everything_nothing_moves(graph: Graph) -> None:
    for budget in (unmanaged_peak(graph, DEVICE), None):
        assert set(LargeModelSupport().plan(graph, DEVICE, budget).counts) <= {Verb.RUN, Verb.FREE}


def test_no_swap_in_of_backward_starts_in_forward() -> None:
    made = LargeModelSupport(threshold=0, ahead=100).plan(CHAIN, DEVICE, PEAK)
    first = next(op.id for op in CHAIN.ops if op.phase is Phase.BACKWARD)
    assert all(int(move.split()[0]) >= first for move in moves(CHAIN, made) if " prefetch " in move)
