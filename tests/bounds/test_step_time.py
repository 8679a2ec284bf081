"""The bound is one: no schedule beats it, of all there are for tiny steps; and by hand it is what it should be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bounds.exhaustive import shortest
from tests.policies.plans import with_moving_state
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.bounds.step_time import lower_bound_seconds
from overspill.core import Algorithm, Device, Graph, LayerType, Op, Phase, Tensor, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds
from overspill.planning.algorithms import memory_optimal
from overspill.planning.floor import algorithms_within, floor_of
from overspill.planning.step_program import StepProgram
from overspill.policies import POLICIES, policy_named
from overspill.simulate import check, simulate

EXAMPLES = settings(max_examples=30, deadline=None)
IN_ORDER = sorted(set(POLICIES) - {"dymem"})  # dymem runs ops in another order
STATES = 3000


@st.composite
def with_menus(draw: st.DrawFn) -> Graph:
    """A random step in which some ops have slower algorithms with less workspace, and some have parameters that move."""
    graph = draw(networks())
    menus = draw(st.lists(st.booleans(), min_size=len(graph.ops), max_size=len(graph.ops)))
    ops = []
    for op, menu in zip(graph.ops, menus, strict=True):
        most = op.workspace_bytes + 5000
        algorithms = (Algorithm("fast", most), Algorithm("mean", 1000, 1.5), Algorithm("small", 0, 3.0))
        ops.append(replace(op, workspace_bytes=most, algorithms=algorithms) if menu else op)
    graph = replace(graph, ops=tuple(ops))
    return with_moving_state(graph) if draw(st.booleans()) else graph


@given(
    graph=with_menus(),
    device=devices(max_share=0.0),
    share=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 0.7]),
    name=st.sampled_from([*IN_ORDER, "auto"]),
)
@EXAMPLES
def test_no_policy_beats_the_bound(graph: Graph, device: Device, share: float, name: str) -> None:
    program = StepProgram(graph)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + int(share * (int(program.live_bytes().max()) - least))
    seconds = op_seconds(graph, device)
    policy = policy_named(name)
    try:
        made = policy.plan(graph, device, budget if policy.plans_for_budget else None)
    except InfeasibleBudgetError:
        return
    # What a schedule of a policy that knows no budget needs is a budget that it meets.
    peak = check(graph, replace(made, budget_bytes=None)).peak_bytes
    took = simulate(graph, made, device, seconds).step_seconds
    assert lower_bound_seconds(graph, device, max(peak, least), seconds) <= took * (1 + 1e-6)


_SIZES = st.sampled_from([1, 2, 2, 3, 4])


@st.composite
def tiny_steps(draw: st.DrawFn) -> Graph:
    """Up to eight ops over up to seven tensors, of any shape: several outputs, updates in place, state that moves."""
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def tensor(*, persistent: bool) -> int:
        number, size = len(tensors), draw(_SIZES)
        movable = draw(st.sampled_from([True, True, True, False]))
        kind = TensorKind.PARAMETER if persistent else TensorKind.ACTIVATION
        tensors.append(Tensor(number, size, kind, f"t{number}", (size,), "uint8", persistent, movable))
        return number

    def op(phase: Phase, new: int, again: bool, updated: list[int]) -> None:
        number, pool = len(ops), [t.id for t in tensors]
        reads = tuple(draw(st.lists(st.sampled_from(pool), max_size=3, unique=True))) if pool else ()
        made = tuple(tensor(persistent=False) for _ in range(new))
        workspace = draw(st.sampled_from([0, 0, 0, 1, 3]))
        menu = (Algorithm("fast", workspace), Algorithm("small", 0, 2.0)) if workspace and draw(st.booleans()) else ()
        again = again and new > 0
        old = updated if draw(st.booleans()) else []  # else overwritten
        ops.append(
            Op(
                number, f"op{number}", f"l{number}", LayerType.OTHER, phase, tuple(dict.fromkeys((*reads, *old))),
                (*made, *updated), workspace_bytes=workspace, recomputable=again, recompute_reads=reads if again else (),
                recompute_writes=made if again else (), algorithms=menu,
            )
        )  # fmt: skip

    for _ in range(draw(st.integers(0, 2))):
        tensor(persistent=True)
    states = [t.id for t in tensors]
    for _ in range(draw(st.integers(1, 3))):
        op(Phase.FORWARD, draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([True, True, False])), [])
    for _ in range(draw(st.integers(1, 4))):
        new = draw(st.integers(0, 1)) if len(tensors) < 7 else 0
        updated = draw(st.lists(st.sampled_from([t.id for t in tensors]), max_size=1)) if draw(st.booleans()) else []
        op(Phase.BACKWARD, new, draw(st.booleans()), updated)
    for state in states:
        if draw(st.booleans()):
            op(Phase.UPDATE, 0, again=False, updated=[state])
    return Graph("tiny", tuple(tensors), tuple(ops), tuple(draw(st.lists(st.just(len(tensors) - 1), max_size=1))))


@given(
    graph=tiny_steps(), device=devices(max_share=0.0), data=st.data(),
    rates=st.tuples(*2 * [st.sampled_from([0.1, 0.5, 1.0, 2.0])]), latency=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
@EXAMPLES
def test_the_best_of_all_schedules_of_a_tiny_step_takes_no_less(
    graph: Graph, device: Device, rates: tuple[float, float], latency: float, data: st.DataObject
) -> None:
    device = replace(  # the search knows no host that issues ops, which takes longer than ops of no length
        device, offload_bytes_per_second=rates[0], prefetch_bytes_per_second=rates[1], transfer_latency_seconds=latency,
        kind="cpu", transfer_host_seconds=0.0,
    )  # fmt: skip
    lengths = st.sampled_from([0.0, 1.0, 2.0, 5.0])
    seconds = tuple(data.draw(st.lists(lengths, min_size=len(graph.ops), max_size=len(graph.ops))))
    program = StepProgram(graph)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + data.draw(st.integers(-1, 2))
    found = shortest(graph, device, budget, seconds, STATES)
    if found is None:
        return
    took, made = found
    assert check(graph, made).peak_bytes <= budget
    assert abs(simulate(graph, made, device, seconds).step_seconds - took) <= 1e-6 * (1 + took)
    assert lower_bound_seconds(graph, device, budget, seconds) <= took * (1 + 1e-6)


def shared_outputs() -> Graph:
    """An op makes `a` and `b`; `a` is used once more before another op needs all memory, and then both are."""
    build = Build()
    a, b = build.tensor(1000, name="a", movable=False), build.tensor(1000, name="b", movable=False)
    build.op([], [a, b], again=True, flops=10**9)
    build.op([a], [], Phase.BACKWARD)
    build.op([], [], Phase.BACKWARD, workspace_bytes=2000)
    build.op([a, b], [], Phase.BACKWARD)
    return build.graph()


def test_one_run_for_two_outputs_counts_once() -> None:
    graph = shared_outputs()
    seconds = op_seconds(graph, DEVICE)
    found = shortest(graph, DEVICE, 2000, seconds, STATES)
    assert found is not None
    assert abs(found[0] - (sum(seconds) + seconds[0])) < 1e-9
    assert 0.999 * found[0] < lower_bound_seconds(graph, DEVICE, 2000, seconds) <= found[0]


@given(graph=networks(), device=devices())
@EXAMPLES
def test_with_memory_for_all_the_bound_is_the_time_of_the_ops(graph: Graph, device: Device) -> None:
    seconds = op_seconds(graph, device)
    peak = int(StepProgram(graph).live_bytes().max())
    assert lower_bound_seconds(graph, device, peak, seconds) == sum(seconds)


@given(graph=networks(), device=devices(), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@EXAMPLES
def test_a_larger_budget_has_no_larger_bound(graph: Graph, device: Device, shares: tuple[float, float]) -> None:
    program = StepProgram(graph)
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
    out, back = DEVICE.offload_seconds(1_000_000), DEVICE.prefetch_seconds(1_000_000)
    bound = lower_bound_seconds(graph, DEVICE, 1_000_100, seconds)
    assert 0.999 * (out + back) < bound - sum(seconds) <= out + back


def test_what_runs_again_does_so_after_the_step_that_had_no_room_and_one_after_another() -> None:
    """An op needs all memory: before it one tensor leaves, which takes long, and after it three are made again."""
    device = replace(DEVICE, offload_bytes_per_second=1e6, prefetch_bytes_per_second=1e12, full_duplex=True)
    build = Build()
    image = build.tensor(8, TensorKind.INPUT, "x", persistent=True)
    drawn = build.tensor(1_000_000, name="drawn")
    made = [build.tensor(1_000_000, name=f"made{i}") for i in range(3)]
    build.op([image], [drawn], layer="drawn")
    for i, tensor in enumerate(made):
        build.op([image], [tensor], layer=f"made{i}", again=True, flops=10**9)
    build.op([image], [], layer="all", workspace_bytes=3_000_000)
    for tensor in [*made, drawn]:
        build.op([tensor], [], Phase.BACKWARD, layer=f"b{tensor}")
    graph = build.graph()
    seconds = tuple(0.3 if op.recomputable else 0.0 for op in graph.ops)
    # One second for the way out, less the ops that it hides behind, and then a run of each op that cannot hide.
    expected = 1.0 + 3 * 0.3
    bound = lower_bound_seconds(graph, device, 3_000_010, seconds)
    assert 0.999 * expected < bound <= expected + 1e-3


def test_a_tensor_of_which_a_part_is_over_the_budget_leaves_as_a_whole() -> None:
    graph = network([Layer(1_000_000, random=True, flops=0) for _ in range(4)])
    seconds = op_seconds(graph, DEVICE)
    peak = int(StepProgram(graph).live_bytes().max())
    out, back = DEVICE.offload_seconds(1_000_000), DEVICE.prefetch_seconds(1_000_000)
    bound = lower_bound_seconds(graph, DEVICE, peak - 500_000, seconds)
    assert 0.999 * (out + back) < bound - sum(seconds) <= out + back


def test_an_algorithm_that_has_no_room_alone_is_given_up_and_its_time_counted() -> None:
    build = Build()
    image = build.tensor(8, TensorKind.INPUT, "x", persistent=True)
    out = build.tensor(1000, TensorKind.TEMPORARY)
    build.op([image], [out], kind=LayerType.CONV, flops=10**6, workspace_bytes=50_000)
    graph = build.graph([out])
    menu = (Algorithm("fast", 50_000), Algorithm("slow", 0, 2.0))
    graph = replace(graph, ops=(replace(graph.ops[0], algorithms=menu),))
    seconds = op_seconds(graph, DEVICE)
    assert algorithms_within(StepProgram(graph), 10_000) == {0: 1}
    assert 1.5 * seconds[0] < lower_bound_seconds(graph, DEVICE, 10_000, seconds) <= 2 * seconds[0]
    assert algorithms_within(StepProgram(graph), 60_000) == {}
