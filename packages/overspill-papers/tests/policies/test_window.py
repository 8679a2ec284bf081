"""`window`: the paper's steps (a) to (d) on steps made by hand, and what holds on every step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import (
    faster_links_are_never_slower,
    floor_bytes,
    larger_budgets_are_kept_and_never_slower,
    moves,
    with_moving_state,
)
from tests.simulate.graphs import DEVICE, Build, Layer, devices, layers, network, networks

from overspill.core import Device, Graph, Phase, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import unmanaged_peak
from overspill.simulate import check
from overspill_papers.policies.window import VariableSequence, Window

EXAMPLES = settings(max_examples=20, deadline=None)
# Ops 0 to 3 make y0 to y3, 4 and 5 are the loss, 6 to 9 the backward of l3 to l0, which reads the layer's input.
CHAIN = network([Layer(10_000) for _ in range(4)])
FORWARD_PEAK = 8192 + 4 + 40_000


def swaps(graph: Graph, window_bytes: int) -> dict[str, int]:
    """Each swap-out by the tensor's name and the step behind which it starts, and the step before which it is back."""
    found = VariableSequence(StepProgram(graph)).swaps(window_bytes)
    return {f"{graph.tensors[gap.tensor].name} behind {gap.start}": back for gap, back in found.items()}


@pytest.mark.parametrize(
    ("window_bytes", "back"),
    [
        (0, {"y0 behind 1": 8, "y1 behind 2": 7, "y2 behind 3": 6}),
        # Before step 5 the window holds y3, dy3 | dy3, y2: the four variables up to y2.
        (39_999, {"y0 behind 1": 8, "y1 behind 2": 7, "y2 behind 3": 6}),
        (40_000, {"y0 behind 1": 8, "y1 behind 2": 7, "y2 behind 3": 5}),
        # From step 6 dy3, y2, dy2 | dy2, y1, and from step 7 dy2, y1, dy1 | dy1, y0.
        (50_000, {"y0 behind 1": 7, "y1 behind 2": 6, "y2 behind 3": 5}),
        # At step 3 the window reaches y2, which so is not swapped out (d); y1 it would reach in forward.
        (80_000, {"y0 behind 1": 6, "y1 behind 2": 5}),
    ],
)
def test_a_variable_returns_when_the_window_reaches_it(window_bytes: int, back: dict[str, int]) -> None:
    assert swaps(CHAIN, window_bytes) == back


def test_the_oldest_swap_out_ends_when_its_memory_is_needed_and_the_rest_stays() -> None:
    made = Window(window_bytes=50_000).plan(CHAIN, DEVICE, FORWARD_PEAK)
    assert moves(CHAIN, made) == ["2 offload y0", "5 await_offload y0", "7 prefetch y0", "8 await_prefetch y0"]


def test_with_less_memory_more_swap_outs_end_the_oldest_first() -> None:
    made = Window(window_bytes=0).plan(CHAIN, DEVICE, FORWARD_PEAK - 10_000)
    assert moves(CHAIN, made) == [
        "2 offload y0", "3 offload y1", "3 await_offload y0", "5 await_offload y1",
        "7 prefetch y1", "7 await_prefetch y1", "8 prefetch y0", "8 await_prefetch y0",
    ]  # fmt: skip


def test_a_window_larger_than_memory_says_how_much_it_needs() -> None:
    policy = Window(window_bytes=80_000)
    with pytest.raises(InfeasibleBudgetError) as caught:
        policy.plan(CHAIN, DEVICE, FORWARD_PEAK)
    # When y1 is back before step 5, only y0 is away there.
    assert caught.value.floor_bytes == floor_bytes(policy, CHAIN, DEVICE)
    assert check(CHAIN, policy.plan(CHAIN, DEVICE, caught.value.floor_bytes)).peak_bytes == caught.value.floor_bytes


def test_what_the_store_holds_is_not_copied_again() -> None:
    build = Build()
    kept, large = build.tensor(10_000), [build.tensor(40_000) for _ in range(2)]
    build.op([], [kept])
    for tensor in large:
        build.op([], [tensor])
        build.op([tensor], [])
        build.op([kept], [])
    graph = build.graph()
    made = Window(window_bytes=0).plan(graph, DEVICE, 40_000)
    assert moves(graph, made) == [
        "1 offload t0", "1 await_offload t0", "3 prefetch t0", "3 await_prefetch t0", "6 prefetch t0",
        "6 await_prefetch t0",
    ]  # fmt: skip


def test_a_copy_starts_behind_the_first_use_although_memory_is_short_only_later() -> None:
    build = Build()
    first, second, large = build.tensor(10_000), build.tensor(10_000), build.tensor(30_000)
    build.op([], [first])
    build.op([], [second])
    build.op([second], [])
    build.op([first], [second])
    build.op([], [large])
    build.op([large], [])
    build.op([first, second], [])
    made = Window(window_bytes=0).plan(graph := build.graph(), DEVICE, 40_000)
    # The first gap of t0 ends at step 3; its memory goes in the second.
    assert "1 offload t0" in moves(graph, made)
    assert "4 await_offload t0" in moves(graph, made)


def test_parameters_that_may_move_live_in_the_store_between_steps() -> None:
    graph = with_moving_state(network([Layer(10_000, weight_bytes=20_000) for _ in range(3)]))
    made = Window(window_bytes=0).plan(graph, DEVICE, floor_bytes(Window(), graph, DEVICE))
    home = [graph.tensors[t].name for t in made.stored]
    assert home == ["w2"]
    swaps = [move for move in moves(graph, made) if move.endswith(" w2")]
    # It comes for its forward, goes, comes for its update, and goes as it is now.
    assert swaps == [
        "2 prefetch w2", "2 await_prefetch w2", "8 prefetch w2", "8 await_prefetch w2", "9 offload w2",
        "10 await_offload w2",
    ]  # fmt: skip


def test_gradients_and_parameters_move_through_backward_and_update() -> None:
    graph = with_moving_state(network([Layer(10_000, weight_bytes=20_000) for _ in range(3)]))
    made = Window(window_bytes=0).plan(graph, DEVICE, floor_bytes(Window(), graph, DEVICE))
    kinds = {graph.tensors[t].kind for t in made.targets(Verb.OFFLOAD)}
    assert kinds == {TensorKind.PARAMETER, TensorKind.ACTIVATION, TensorKind.GRADIENT}


@given(networks())
@EXAMPLES
def test_with_room_for_everything_nothing_moves(graph: Graph) -> None:
    for budget in (unmanaged_peak(graph, DEVICE), None):
        assert set(Window().plan(graph, DEVICE, budget).counts) <= {Verb.RUN, Verb.FREE}


def test_with_swaps_in_every_step_parameters_go_home_though_there_is_room() -> None:
    graph = with_moving_state(network([Layer(10_000, weight_bytes=20_000) for _ in range(3)]))
    made = Window(every_step=True).plan(graph, DEVICE, 2 * unmanaged_peak(graph, DEVICE))
    check(graph, made)
    weights = [t.id for t in graph.tensors if t.name in {"w1", "w2"}]  # w0 is needed at both ends of the step
    assert sorted(made.stored) == weights
    assert sorted(made.targets(Verb.PREFETCH)) == sorted(made.targets(Verb.OFFLOAD)) == weights  # and no feature map


@given(layers().map(network).map(with_moving_state), devices(), st.sampled_from([0.0, 0.4, 1.0, 2.0]))
@EXAMPLES
def test_swaps_in_every_step_keep_every_budget(graph: Graph, device: Device, share: float) -> None:
    policy = Window(every_step=True)
    floor = floor_bytes(policy, graph, device)
    check(graph, policy.plan(graph, device, floor + int(share * unmanaged_peak(graph, device))))


@given(networks())
@EXAMPLES
def test_it_reaches_the_floor_of_all_policies_that_only_move(graph: Graph) -> None:
    floor = min(floor_of(StepProgram(graph)).nbytes, unmanaged_peak(graph, DEVICE))
    assert check(graph, Window().plan(graph, DEVICE, floor)).peak_bytes <= floor


@given(layers().map(network).map(with_moving_state), devices(), st.sampled_from([0.0, 0.1, 0.4, 0.8]))
@EXAMPLES
def test_every_budget_is_kept_where_parameters_move(graph: Graph, device: Device, share: float) -> None:
    floor = floor_of(StepProgram(graph)).nbytes
    budget = floor + int(share * (unmanaged_peak(graph, device) - floor))
    check(graph, Window().plan(graph, device, budget))


@given(networks())
@EXAMPLES
def test_no_copy_is_made_twice_without_an_update_between(graph: Graph) -> None:
    made = Window().plan(graph, DEVICE, floor_of(StepProgram(graph)).nbytes)
    written = {t for op in graph.ops for t in op.writes if t in op.reads}
    copies = [t for t in made.targets(Verb.OFFLOAD) if t not in written]
    assert len(copies) == len(set(copies))


@given(networks(), devices())
@EXAMPLES
def test_larger_budgets_are_kept_and_never_slower(graph: Graph, device: Device) -> None:
    larger_budgets_are_kept_and_never_slower(Window(), graph, device)


@given(networks(), devices(), st.sampled_from([0.0, 0.3, 0.7]))
@EXAMPLES
def test_faster_links_are_never_slower(graph: Graph, device: Device, share: float) -> None:
    floor = floor_of(StepProgram(graph)).nbytes
    budget = floor + int(share * (unmanaged_peak(graph, device) - floor))
    faster_links_are_never_slower(Window(), graph, device, budget)


def test_what_leaves_in_forward_is_gone_before_backward() -> None:
    made = Window(window_bytes=0).plan(CHAIN, DEVICE, FORWARD_PEAK)
    first = next(op.id for op in CHAIN.ops if op.phase is Phase.BACKWARD)
    for move in moves(CHAIN, made):
        step, verb, _ = move.split()
        assert (int(step) <= first) == verb.endswith("offload")
