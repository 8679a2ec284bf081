"""What holds for each policy on every step: its schedule is valid, keeps its promises, and respects the two graphs."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks_that_return

from overspill.core import Device, Graph, Phase, Schedule, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.planning.floor import floor_of
from overspill.planning.gaps import SMALLEST_MOVE_BYTES
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.policies import POLICIES, policy_named
from overspill.simulate import check

EXAMPLES = settings(max_examples=12, deadline=None)
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
TRANSFERS = (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH)


def tight(graph: Graph, name: str, device: Device = DEVICE) -> int | None:
    """A budget in the middle of what can be met, for a policy that wants one; the least it says it can, if that is more."""
    if not POLICIES[name].plans_for_budget:
        return None
    with pytest.raises(InfeasibleBudgetError) as infeasible:
        POLICIES[name]().plan(graph, device, 1)
    return max((floor_of(StepProgram(graph)).nbytes + unmanaged_peak(graph, DEVICE)) // 2, infeasible.value.floor_bytes)


def at_the_boundary(graph: Graph, made: Schedule) -> int:
    """The first instruction that belongs to backward: what follows the last forward op and comes after its last Free."""
    last = max((op.id for op in graph.ops if op.phase is Phase.FORWARD), default=-1)
    return 1 + next(i for i, ins in enumerate(made.instructions) if ins.verb is Verb.RUN and ins.target == last)


def transfers_over_the_boundary(graph: Graph, made: Schedule) -> set[int]:
    """The tensors whose way out or back begins in forward and ends in backward."""
    boundary = at_the_boundary(graph, made)
    begun = {(i.verb, i.target) for i in made.instructions[:boundary]}
    out, gone, back, there = ({t for v, t in begun if v is verb} for verb in TRANSFERS)
    # What was started in forward is awaited in forward, or at once behind its last op.
    for instruction in made.instructions[boundary:]:
        if instruction.verb in (Verb.RUN, Verb.RECOMPUTE):
            break
        gone.add(instruction.target)
    return (out - gone) | (back ^ there)


@every_policy
@given(graph=networks_that_return(), device=devices())
@EXAMPLES
def test_its_schedule_is_valid_does_what_it_declares_within_each_graph_and_is_made_again(
    name: str, graph: Graph, device: Device
) -> None:
    policy, budget = POLICIES[name](), tight(graph, name, device)
    made = policy.plan(graph, device, budget)
    check(graph, made)
    assert policy.offloads or not made.counts.keys() & set(TRANSFERS)
    assert policy.recomputes or Verb.RECOMPUTE not in made.counts
    assert (made.policy.partition(":")[0], made.budget_bytes) == (name, budget)
    assert policy_named(made.policy).plan(graph, device, budget).instructions == made.instructions
    moved = [graph.tensors[t] for t in made.targets(Verb.OFFLOAD)]
    assert all(t.movable and t.nbytes >= SMALLEST_MOVE_BYTES for t in moved)
    assert not transfers_over_the_boundary(graph, made)
    assert policy.plan(graph, device, budget) == made


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if POLICIES[name].plans_for_budget])
@given(graph=networks_that_return(), device=devices())
@EXAMPLES
def test_the_budget_that_its_error_names_is_the_smallest_that_works(name: str, graph: Graph, device: Device) -> None:
    policy = POLICIES[name]()
    with pytest.raises(InfeasibleBudgetError) as infeasible:
        policy.plan(graph, device, 1)
    floor = infeasible.value.floor_bytes
    assert check(graph, policy.plan(graph, device, floor)).peak_bytes <= floor
    with pytest.raises(InfeasibleBudgetError) as short:
        policy.plan(graph, device, floor - 1)
    assert short.value.floor_bytes == floor


@pytest.mark.parametrize("name", [name for name in sorted(POLICIES) if POLICIES[name].plans_for_budget])
def test_a_step_without_ops_needs_what_is_there(name: str) -> None:
    build = Build()
    build.tensor(1000, TensorKind.PARAMETER, persistent=True)
    with pytest.raises(InfeasibleBudgetError) as infeasible:
        POLICIES[name]().plan(build.graph(), DEVICE, 999)
    assert infeasible.value.floor_bytes == 1000
    check(build.graph(), POLICIES[name]().plan(build.graph(), DEVICE, 1000))


@every_policy
def test_its_plan_carries_the_figures_of_check(name: str) -> None:
    graph = network([Layer(10_000, flops=10**7) for _ in range(8)])
    peak = unmanaged_peak(graph, DEVICE)
    plan = make_plan(graph, DEVICE, name, 2 * peak)
    assert plan.peak_bytes == plan.timeline.peak_bytes == check(graph, plan.schedule).peak_bytes
    assert plan.unmanaged_peak_bytes == peak
    assert plan.step_seconds >= plan.lower_bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(n for n, p in POLICIES.items() if not (p.plans_for_budget or p.unlimited)))
def test_a_fixed_schedule_that_does_not_fit_is_infeasible_with_its_peak_as_the_floor(name: str) -> None:
    graph = network([Layer(10_000) for _ in range(8)])
    peak = check(graph, POLICIES[name]().plan(graph, DEVICE)).peak_bytes
    assert make_plan(graph, DEVICE, name, peak).peak_bytes == peak
    with pytest.raises(InfeasibleBudgetError) as caught:
        make_plan(graph, DEVICE, name, peak - 1)
    assert (caught.value.floor_bytes, caught.value.budget_bytes) == (peak, peak - 1)


@every_policy
@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_that_is_not_positive_is_a_mistake_of_the_caller(name: str, budget: int) -> None:
    with pytest.raises(ValueError, match="budget"):
        POLICIES[name]().plan(network([Layer(100)]), DEVICE, budget)


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_as_it_was_after_a_plan_and_after_none(on: bool) -> None:
    graph = network([Layer(10_000)] * 3)
    (gc.enable if on else gc.disable)()
    try:
        POLICIES["auto"]().plan(graph, DEVICE, unmanaged_peak(graph, DEVICE) - 1)
        assert gc.isenabled() is on
        with pytest.raises(InfeasibleBudgetError):
            POLICIES["auto"]().plan(graph, DEVICE, 1)
        assert gc.isenabled() is on
    finally:
        gc.enable()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_it_is_found_by_its_name_and_says_what_it_is(name: str) -> None:
    policy = policy_named(name)
    assert policy.name == name
    assert policy.summary
    assert policy.source
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def test_an_unknown_policy_name_lists_the_names_and_the_closest() -> None:
    with pytest.raises(RequestError) as caught:
        policy_named("vdnn-con")
    assert "did you mean 'vdnn-conv'?" in str(caught.value)
    assert all(name in str(caught.value) for name in POLICIES)
