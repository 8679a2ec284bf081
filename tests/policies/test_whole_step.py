"""Policies on graphs of a whole step: parameters, gradients and optimizer state are tensors as all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import floor_bytes, larger_budgets_are_kept_and_never_slower, seconds_of, with_moving_state
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.bounds.whole_step import whole_step_bound_seconds
from overspill.core import Device, Graph, Phase, Tensor, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds
from overspill.planning.effort import Effort
from overspill.planning.floor import floor_of
from overspill.planning.order import early_updates, feature_maps_alone, in_graph_order, reordered
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.policies import POLICIES, policy_named
from overspill.policies.auto import Auto
from overspill.policies.auto.search import Search
from overspill.simulate import check

EXAMPLES = settings(max_examples=12, deadline=None)
FEATURE_MAPS_ONLY = ("vdnn-all", "vdnn-conv", "vdnn-dynamic", "superneurons", "dymem", "checkpoint")
ALL_VARIABLES = ("window", "lms", "auto")
LAYERS = [Layer(200_000, weight_bytes=400_000, flops=10**8) for _ in range(4)]


def whole(graph: Graph) -> Graph:
    """The same step as one graph, with two tensors of optimizer state for each parameter."""
    graph = with_moving_state(graph)
    tensors, ops = list(graph.tensors), list(graph.ops)
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            owned = [t for t in op.writes if graph.tensors[t].kind is TensorKind.PARAMETER]
            state = range(len(tensors), len(tensors) + 2 * len(owned))
            for number, parameter in zip(state, owned * 2, strict=True):
                like = graph.tensors[parameter]
                name = f"state {number} of {like.name}"
                tensors.append(replace(like, id=number, kind=TensorKind.OPTIMIZER_STATE, name=name, movable=True))
            ops[op.id] = replace(op, reads=(*op.reads, *state), writes=(*op.writes, *state))
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops), whole_step=True)


def moved(graph: Graph, made: object) -> list[Tensor]:
    return [graph.tensors[t] for t in dict.fromkeys((*made.targets(Verb.OFFLOAD), *made.stored))]  # type: ignore[attr-defined]


def middle(graph: Graph) -> int:
    return (floor_of(StepProgram(graph)).nbytes + unmanaged_peak(graph, DEVICE)) // 2


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(graph=networks(), device=devices())
@EXAMPLES
def test_every_schedule_is_valid(name: str, graph: Graph, device: Device) -> None:
    step = whole(graph)
    policy = POLICIES[name]()
    budget = max(middle(step), floor_bytes(policy, step, device)) if policy.plans_for_budget else None
    check(step, policy.plan(step, device, budget))


@pytest.mark.parametrize(("weight_bytes", "flops", "orders"), [(4_000_000, 10**8, 1), (200_000, 10**9, 2)])
def test_an_order_in_which_the_best_plan_of_another_is_far_slower_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, weight_bytes: int, flops: int, orders: int
) -> None:
    found: list[Search] = []
    best = Search.best
    monkeypatch.setattr(Search, "best", lambda self: [found.append(self), best(self)][1])
    step = whole(network([Layer(200_000, weight_bytes=weight_bytes, flops=flops) for _ in range(8)]))
    Auto(effort=Effort(evaluations=1000)).plan(step, DEVICE, middle(step))
    assert len(found) == orders


@pytest.mark.parametrize("name", FEATURE_MAPS_ONLY)
def test_the_papers_policies_of_feature_maps_keep_to_them(name: str) -> None:
    step = whole(network(LAYERS))
    policy = policy_named(name)
    least = floor_bytes(policy, step, DEVICE) if policy.plans_for_budget else None
    made = policy.plan(step, DEVICE, least)
    assert not made.stored
    assert {t.kind for t in moved(step, made)} <= {TensorKind.ACTIVATION, TensorKind.TEMPORARY}


@pytest.mark.parametrize("name", ALL_VARIABLES)
def test_the_others_move_parameters_and_optimizer_state(name: str) -> None:
    step = whole(network(LAYERS))
    policy = policy_named(name)
    made = policy.plan(step, DEVICE, floor_bytes(policy, step, DEVICE))
    assert {TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE} <= {t.kind for t in moved(step, made)}
    assert made.stored


@pytest.mark.parametrize("name", ["window", "lms"])
@given(graph=networks(), device=devices())
@EXAMPLES
def test_a_larger_budget_is_never_slower(name: str, graph: Graph, device: Device) -> None:
    larger_budgets_are_kept_and_never_slower(policy_named(name), whole(graph), device)


@given(graph=networks(), device=devices())
@EXAMPLES
def test_auto_is_never_slower_than_the_policies_of_all_variables(graph: Graph, device: Device) -> None:
    step = whole(graph)
    budget = middle(step)
    ours = seconds_of(step, policy_named("auto").plan(step, device, budget), device)
    for name in ("window", "lms"):
        try:
            other = policy_named(name).plan(step, device, budget)
        except InfeasibleBudgetError:
            continue
        assert ours <= seconds_of(step, other, device) * (1 + 1e-9), name


@given(graph=networks())
@EXAMPLES
def test_early_updates_are_an_order_of_the_same_step(graph: Graph) -> None:
    step = whole(graph)
    order = early_updates(step)
    assert sorted(order) == list(range(len(step.ops)))
    made = policy_named("liveness").plan(reordered(step, order), DEVICE)
    assert (
        check(step, in_graph_order(made, order)).peak_bytes
        <= check(step, policy_named("liveness").plan(step, DEVICE)).peak_bytes
    )


def test_an_update_follows_the_last_reader_of_its_parameter() -> None:
    step = whole(network(LAYERS))
    order = early_updates(step)
    place = {op: i for i, op in enumerate(order)}
    for op in step.ops:
        if op.phase is Phase.UPDATE:
            before = [r for t in op.writes for r in step.consumers[t] if r != op.id]
            assert place[op.id] > max(place[r] for r in before)
            assert place[op.id] <= 2 + max(
                place[r] for r in (*before, *(step.producer[t] for t in op.reads if t in step.producer))
            )


def test_the_bound_is_below_the_plan_in_whatever_order_it_updates() -> None:
    step = whole(network(LAYERS))
    for share in (0.0, 0.3, 0.6):
        least = floor_of(StepProgram(step)).nbytes
        plan = make_plan(step, DEVICE, "auto", int(least + share * (unmanaged_peak(step, DEVICE) - least)))
        assert sum(op_seconds(step, DEVICE)) <= plan.lower_bound_seconds * (1 + 1e-9)
        assert plan.lower_bound_seconds <= plan.step_seconds * (1 + 1e-9)


def test_state_that_has_no_room_in_forward_leaves_before_it_or_after_its_update() -> None:
    """One second on the link, of which no more is hidden than the last op of backward and the update take."""
    build = Build()
    weight = build.tensor(8, TensorKind.PARAMETER, persistent=True)
    moment = build.tensor(1_000_000, TensorKind.PARAMETER, persistent=True)
    gradient = build.tensor(8, TensorKind.TEMPORARY)
    build.op([weight], [], workspace_bytes=2_000_000)
    build.op([weight], [], Phase.BACKWARD)
    build.op([weight], [gradient], Phase.BACKWARD)
    build.op([gradient, weight, moment], [weight, moment], Phase.UPDATE)
    step = replace(with_moving_state(build.graph()), whole_step=True)
    seconds = (0.1, 5.0, 0.1, 0.1)
    assert 0.99 * (sum(seconds) + 0.8) < whole_step_bound_seconds(step, DEVICE, 2_000_100, seconds)
    assert whole_step_bound_seconds(step, DEVICE, 2_000_100, seconds) <= sum(seconds) + 1.0


@given(graph=networks(), device=devices(), share=st.floats(0, 1))
@EXAMPLES
def test_no_policy_beats_the_bound(graph: Graph, device: Device, share: float) -> None:
    step = whole(graph)
    least = floor_of(StepProgram(step)).nbytes
    budget = int(least + share * (unmanaged_peak(step, device) - least))
    bound = whole_step_bound_seconds(step, device, budget, op_seconds(step, device))
    for name in ("window", "lms", "auto", "checkpoint"):
        try:
            made = policy_named(name).plan(step, device, budget)
        except InfeasibleBudgetError:
            continue
        if check(step, replace(made, budget_bytes=None)).peak_bytes <= budget:
            assert bound <= seconds_of(step, made, device) * (1 + 1e-9), name


@given(graph=networks(), device=devices(), share=st.floats(0, 1))
@EXAMPLES
def test_auto_is_never_slower_than_a_plan_of_feature_maps_alone(graph: Graph, device: Device, share: float) -> None:
    step = whole(graph)
    alone = feature_maps_alone(step)
    least = floor_of(StepProgram(alone)).nbytes
    budget = int(least + share * (unmanaged_peak(step, device) - least))
    other = seconds_of(step, policy_named("auto").plan(alone, device, budget), device)
    assert seconds_of(step, policy_named("auto").plan(step, device, budget), device) <= other * (1 + 1e-9)
