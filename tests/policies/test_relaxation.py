"""The relaxation's optimum is a bound: no schedule of any policy beats it, and by hand it is what it should be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.core import Algorithm, Device, Graph, LayerType, Phase, TensorKind
from overspill.core.errors import InfeasibleBudget
from overspill.costs import op_seconds
from overspill.policies import POLICIES, policy_named
from overspill.policies.algorithms import memory_optimal
from overspill.policies.floor import algorithms_within, floor_of
from overspill.policies.program import Program
from overspill.policies.relaxation import lower_bound_seconds
from overspill.simulate import check, simulate

EXAMPLES = settings(max_examples=60, deadline=None)
IN_ORDER = sorted(set(POLICIES) - {"dymem"})  # dymem runs ops in another order


@st.composite
def with_menus(draw: st.DrawFn) -> Graph:
    """A random step in which some ops have slower algorithms with less workspace."""
    graph = draw(networks())
    menus = draw(st.lists(st.booleans(), min_size=len(graph.ops), max_size=len(graph.ops)))
    ops = []
    for op, menu in zip(graph.ops, menus, strict=True):
        most = op.workspace_bytes + 5000
        algorithms = (Algorithm("fast", most), Algorithm("mean", 1000, 1.5), Algorithm("small", 0, 3.0))
        ops.append(replace(op, workspace_bytes=most, algorithms=algorithms) if menu else op)
    return replace(graph, ops=tuple(ops))


@given(
    graph=with_menus(), device=devices(max_share=0.0), share=st.floats(0, 1), name=st.sampled_from([*IN_ORDER, "auto"])
)
@EXAMPLES
def test_no_schedule_beats_the_bound(graph: Graph, device: Device, share: float, name: str) -> None:
    program = Program(graph)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + int(share * (int(program.live_bytes().max()) - least))
    seconds = op_seconds(graph, device)
    policy = policy_named(name)
    try:
        made = policy.plan(graph, device, budget if policy.plans_for_budget else None)
    except InfeasibleBudget:
        return
    # What a schedule of a policy that knows no budget needs is a budget that it meets.
    peak = check(graph, replace(made, budget_bytes=None)).peak_bytes
    took = simulate(graph, made, device, seconds).step_seconds
    assert lower_bound_seconds(graph, device, max(peak, least), seconds) <= took * (1 + 1e-6)


@given(graph=networks(), device=devices())
@EXAMPLES
def test_with_memory_for_all_the_bound_is_the_time_of_the_ops(graph: Graph, device: Device) -> None:
    seconds = op_seconds(graph, device)
    peak = int(Program(graph).live_bytes().max())
    assert lower_bound_seconds(graph, device, peak, seconds) == sum(seconds)


@given(graph=networks(), device=devices(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@EXAMPLES
def test_a_larger_budget_has_no_larger_bound(graph: Graph, device: Device, shares: tuple[float, float]) -> None:
    program = Program(graph)
    least, most = floor_of(program).nbytes, int(program.live_bytes().max())
    small, large = (least + int(share * (most - least)) for share in sorted(shares))
    seconds = op_seconds(graph, device)
    bounds = [lower_bound_seconds(graph, device, budget, seconds) for budget in (small, large)]
    assert bounds[1] <= bounds[0] * (1 + 1e-5)


def far_tensor() -> Graph:
    """A tensor of a million bytes that is not needed while another of that size is, and cannot be recomputed."""
    build = Build()
    image = build.tensor(8, TensorKind.INPUT, "x", persistent=True)
    far, near = build.tensor(1_000_000, name="far"), build.tensor(1_000_000, name="near")
    gradient = build.tensor(8, TensorKind.TEMPORARY, "d")
    build.op([image], [far], layer="a")
    build.op([image], [near], layer="b")
    build.op([near], [gradient], Phase.BACKWARD, layer="b")
    build.op([far, gradient], [], Phase.BACKWARD, layer="a")
    return build.graph()


def test_what_must_leave_costs_its_way_out_and_back() -> None:
    graph = far_tensor()
    seconds = op_seconds(graph, DEVICE)
    out, back = 1_000_000 / DEVICE.offload_bytes_per_second, 1_000_000 / DEVICE.prefetch_bytes_per_second
    bound = lower_bound_seconds(graph, DEVICE, 1_000_100, seconds)
    assert sum(seconds) + 0.5 * (out + back) < bound <= sum(seconds) + out + back


def test_of_a_part_that_must_leave_only_the_part_counts_in_a_fluid() -> None:
    """With room for a tenth more than the one, half of that size away is enough for the relaxation, as for no plan."""
    graph = network([Layer(1_000_000, random=True, flops=0) for _ in range(4)])
    seconds = op_seconds(graph, DEVICE)
    peak = int(Program(graph).live_bytes().max())
    bound = lower_bound_seconds(graph, DEVICE, peak - 500_000, seconds)
    assert (
        sum(seconds)
        < bound
        <= sum(seconds) + 1_000_000 * (1 / DEVICE.offload_bytes_per_second + 1 / DEVICE.prefetch_bytes_per_second)
    )


def test_an_algorithm_that_has_no_room_alone_is_given_up_and_its_time_counted() -> None:
    build = Build()
    image = build.tensor(8, TensorKind.INPUT, "x", persistent=True)
    out = build.tensor(1000, TensorKind.TEMPORARY)
    build.op([image], [out], kind=LayerType.CONV, flops=10**6, workspace_bytes=50_000)
    graph = build.graph([out])
    menu = (Algorithm("fast", 50_000), Algorithm("slow", 0, 2.0))
    graph = replace(graph, ops=(replace(graph.ops[0], algorithms=menu),))
    seconds = op_seconds(graph, DEVICE)
    assert algorithms_within(Program(graph), 10_000) == {0: 1}
    assert 1.5 * seconds[0] < lower_bound_seconds(graph, DEVICE, 10_000, seconds) <= 2 * seconds[0]
    assert algorithms_within(Program(graph), 60_000) == {}
