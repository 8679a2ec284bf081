"""`dymem` against the paper: offload without barriers (§3.2.1), Algorithm 2 (§3.2.2), workspace from what is left (§4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_order import FIG_10, block
from tests.policies.plans import chain, with_menu
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.core import Algorithm, Device, Graph, LayerType, Phase, Schedule, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds
from overspill.planning.order import depth_first
from overspill.planning.step_program import StepProgram
from overspill.simulate import check, simulate
from overspill_papers.planning.layers import layers_of
from overspill_papers.policies.dymem import UNLIMITED, Dymem, Planner, prefetch_starts

EXAMPLES = settings(max_examples=30, deadline=None)
CONV, ACTV, POOL, FC = LayerType.CONV, LayerType.ACTIVATION, LayerType.POOL, LayerType.LINEAR
MIB = 1 << 20
RUN, OFFLOAD, AWAIT_OFFLOAD, PREFETCH, AWAIT_PREFETCH, FREE = (
    Verb.RUN, Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH, Verb.FREE,
)  # fmt: skip


def ids(graph: Graph) -> dict[str, int]:
    return {tensor.name: tensor.id for tensor in graph.tensors}


def spelled(made: Schedule, *without: str, graph: Graph) -> list[tuple[Verb, int | str]]:
    """The instructions, tensors by name, but for those on the tensors `without`."""
    named: list[tuple[Verb, int | str]] = []
    for i in made.instructions:
        target = i.target if i.verb is RUN else graph.tensors[i.target].name
        if target not in without:
            named.append((i.verb, target))
    return named


def planner(graph: Graph, device: Device = DEVICE) -> Planner:
    return Planner(graph, device, op_seconds(graph, device))


# -- offload


def test_nothing_is_awaited_in_forward_while_memory_suffices() -> None:
    graph = chain([POOL, POOL, POOL])
    made = Dymem().plan(graph, DEVICE)
    gradients = [name for name in ids(graph) if name.startswith("d")]
    # The link takes a hundred times as long as an op. Ops 0 to 3 are forward, the last of each the loss.
    assert spelled(made, "loss", *gradients, graph=graph) == [
        (RUN, 0),
        (OFFLOAD, "y0"), (RUN, 1),
        (OFFLOAD, "y1"), (RUN, 2),
        (RUN, 3),
        (AWAIT_OFFLOAD, "y0"), (FREE, "y0"), (AWAIT_OFFLOAD, "y1"), (FREE, "y1"),
        (PREFETCH, "y1"), (PREFETCH, "y0"),
        (RUN, 4), (FREE, "y2"),
        (AWAIT_PREFETCH, "y1"), (RUN, 5), (FREE, "y1"),
        (AWAIT_PREFETCH, "y0"), (RUN, 6), (FREE, "y0"),
        (RUN, 7),
    ]  # fmt: skip


def test_a_copy_that_is_done_by_the_clock_is_released_then() -> None:
    graph = network([Layer(10_000, POOL, flops=10**7), *[Layer(10_000, POOL, flops=10**7)] * 3])
    fast = replace(DEVICE, offload_bytes_per_second=10_000 / 0.015, transfer_latency_seconds=0.0)
    seconds = op_seconds(graph, fast)
    assert seconds[1] == pytest.approx(0.01, rel=0.1)
    made = spelled(Dymem().plan(graph, fast), graph=graph)
    # y0 leaves beside op 1 and takes one and a half ops; y1 waits for the link until then and as much again.
    assert made.index((RUN, 2)) < made.index((AWAIT_OFFLOAD, "y0")) < made.index((RUN, 3))
    assert made.index((RUN, 3)) < made.index((AWAIT_OFFLOAD, "y1")) < made.index((RUN, 4))


def tight_forward() -> Graph:
    """A forward whose third op takes 100,000 bytes of workspace, which makes the peak."""
    build = Build()
    y = [build.tensor(10_000, name=f"y{i}") for i in range(4)]
    d = [build.tensor(4, TensorKind.OUTPUT_GRADIENT, f"d{i}") for i in range(4)]
    for i in range(4):
        build.op([y[i - 1]] if i else [], [y[i]], layer=f"l{i}", kind=POOL, workspace_bytes=100_000 if i == 2 else 0)
    for i in reversed(range(4)):
        build.op([*([d[i + 1]] if i < 3 else []), *([y[i - 1]] if i else [])], [d[i]], Phase.BACKWARD, layer=f"l{i}")
    return build.graph()


def test_compute_is_blocked_where_memory_is_short() -> None:
    graph = tight_forward()
    plans = planner(graph)
    assert plans.floor_bytes == 120_000
    short = spelled(plans.schedule(120_000), graph=graph)
    # While op 2 runs there is room for what it reads and what it makes, and not for y0, which op 1 was the last to read.
    assert short[:8] == [
        (RUN, 0), (OFFLOAD, "y0"), (RUN, 1), (OFFLOAD, "y1"), (AWAIT_OFFLOAD, "y0"), (FREE, "y0"),
        (RUN, 2), (RUN, 3),
    ]  # fmt: skip
    enough = spelled(plans.schedule(130_000), graph=graph)
    assert enough.index((AWAIT_OFFLOAD, "y0")) > enough.index((RUN, 3))


@pytest.mark.parametrize("kind", [LayerType.DROPOUT, LayerType.SOFTMAX, FC, LayerType.LOSS])
def test_what_dropout_softmax_and_fully_connected_layers_read_stays(kind: LayerType) -> None:
    graph = chain([CONV, kind, CONV, POOL])
    names = {graph.tensors[t].name for t in Dymem().plan(graph, DEVICE).targets(OFFLOAD)}
    assert names == {"y1", "y2"}


def test_what_its_last_reader_also_writes_leaves_behind_it() -> None:
    build = Build()
    y, z = build.tensor(10_000, name="y"), build.tensor(10_000, name="z")
    d = build.tensor(4, TensorKind.OUTPUT_GRADIENT)
    build.op([], [y], layer="l0")
    build.op([y], [y, z], layer="l1", kind=POOL)
    build.op([z], [build.tensor(4, TensorKind.TEMPORARY)], layer="l2", kind=LayerType.LOSS)
    build.op([], [d], Phase.BACKWARD, layer="l2")
    build.op([y, d], [], Phase.BACKWARD, layer="l1")
    graph = build.graph()
    made = Dymem().plan(graph, DEVICE)
    check(graph, made)
    assert spelled(made, graph=graph)[:3] == [(RUN, 0), (RUN, 1), (OFFLOAD, "y")]


# -- prefetch


def starts(types: Sequence[LayerType]) -> dict[str, str]:
    """For each layer whose input is away, the layer in whose backward its prefetch starts."""
    graph = chain(types)
    program = StepProgram(graph)
    gaps = [gap for layer in layers_of(program) if layer.type is not LayerType.LOSS for gap in layer.inputs]
    found = prefetch_starts(program, gaps)
    return {
        program.op(program.steps[gap.end]).layer: program.op(program.steps[begin]).layer for gap, begin in found.items()
    }


def test_two_convolutions_are_on_the_device() -> None:
    # The loss is none: at its backward there is room for l4 and l3; as l4 ends and l3 begins, for l2.
    assert starts([CONV] * 5) == {"l4": "loss", "l3": "loss", "l2": "l3", "l1": "l2"}


def test_other_layers_are_taken_on_the_way_up_to_the_third_convolution() -> None:
    assert starts([CONV, POOL, CONV, POOL, ACTV, CONV, POOL, CONV, POOL]) == {
        "l8": "loss", "l7": "loss", "l6": "loss", "l5": "loss", "l4": "loss", "l3": "loss",
        "l2": "l6", "l1": "l6",
    }  # fmt: skip


def algorithm_2(types: Sequence[LayerType]) -> dict[str, str]:
    """The search as the paper has it, made anew for each layer."""
    names = [f"l{i}" for i in range(len(types))] + ["loss"]
    kinds = [*types, LayerType.LOSS]
    found: dict[str, str] = {}
    for layer in reversed(range(len(names))):
        n = int(kinds[layer] is CONV)
        for following in reversed(range(layer)):
            if kinds[following] is CONV:
                if n == 2:
                    break
                n += 1
            if following > 0:  # the first layer's input stays
                found.setdefault(names[following], names[layer])
    return found


@given(st.lists(st.sampled_from([CONV, CONV, ACTV, POOL]), min_size=1, max_size=14))
@EXAMPLES
def test_chains_are_searched_as_in_algorithm_2(types: list[LayerType]) -> None:
    assert starts(types) == algorithm_2(types)


def test_a_layer_that_is_called_twice_has_two_turns() -> None:
    graph = chain([CONV, POOL, CONV, CONV, POOL])
    ops = tuple(replace(op, layer="pool") if op.layer in ("l1", "l4") else op for op in graph.ops)
    program = StepProgram(replace(graph, ops=ops))
    gaps = {program.graph.tensors[g.tensor].name: g for layer in layers_of(program) for g in layer.inputs}
    found = prefetch_starts(program, gaps.values())
    begins = {name: program.op(program.steps[found[gap]]).id for name, gap in gaps.items()}
    # Ops 0 to 5 are forward, 6 the loss's backward, 7 the second call's, 8 to 11 those of l3, l2, the first call and l0.
    assert begins == {"y3": 6, "y2": 6, "y1": 6, "y0": 6}


def test_prefetches_wait_for_room() -> None:
    graph = chain([POOL] * 6)
    plans = planner(graph)
    short, ample = (spelled(plans.schedule(size), graph=graph) for size in (plans.floor_bytes, UNLIMITED))
    loss = next(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    assert all(ample.index((PREFETCH, f"y{i}")) < ample.index((RUN, loss)) for i in range(5))
    assert short.index((PREFETCH, "y0")) > short.index((RUN, loss + 2))


# -- workspace


def lone_convolution() -> Graph:
    build = Build()
    y = build.tensor(MIB, name="y")
    build.op([], [y], kind=CONV)
    return build.graph((y,))


@pytest.mark.parametrize(
    ("room", "algorithm"),
    [(0, 3), (MIB - 1, 3), (MIB, 2), (2 * MIB - 1, 2), (2 * MIB, 1), (4 * MIB - 1, 1), (4 * MIB, 0)],
)
def test_workspace_grows_in_steps_of_one_mebibyte(room: int, algorithm: int) -> None:
    # 3.5 MiB need four steps, 1.5 MiB two.
    graph = with_menu(lone_convolution(), 7 * MIB // 2, 3 * MIB // 2, 1000, 0)
    made = planner(graph).schedule(MIB + room)
    assert made.instructions[0].algorithm == algorithm


def test_a_least_workspace_that_is_no_multiple_of_a_step_is_given_all_the_same() -> None:
    graph = with_menu(lone_convolution(), 3 * MIB, 1000)
    assert planner(graph).floor_bytes == MIB + 1000
    assert planner(graph).schedule(MIB + 1000).instructions[0].algorithm == 1


def test_feature_maps_come_before_workspace() -> None:
    # Memory for y0's copy to finish beside op 2, or for op 2's workspace.
    graph = tight_forward()
    ops = [replace(op, workspace_bytes=0) for op in graph.ops]
    tensors = tuple(replace(t, nbytes=MIB) if t.name.startswith("y") else t for t in graph.tensors)
    menu = (Algorithm("fast", MIB), Algorithm("slow", 0, 2.0))
    ops[2] = replace(ops[2], algorithms=menu, workspace_bytes=MIB)
    graph = replace(graph, ops=tuple(ops), tensors=tensors)
    made = planner(graph).schedule(3 * MIB)
    (run,) = (i for i in made.instructions if i.verb is RUN and i.target == 2)
    assert run.algorithm == 1
    order = spelled(made, graph=graph)
    assert order.index((AWAIT_OFFLOAD, "y0")) > order.index((RUN, 2))
    more = planner(graph).schedule(4 * MIB)
    assert next(i for i in more.instructions if i.verb is RUN and i.target == 2).algorithm == 0


def test_transfers_are_timed_by_the_algorithms_that_are_taken() -> None:
    graph = tight_forward()
    ops = [replace(op, workspace_bytes=0) for op in graph.ops]
    tensors = tuple(replace(t, nbytes=MIB) if t.name.startswith("y") else t for t in graph.tensors)
    menu = (Algorithm("fast", 8 * MIB), Algorithm("slow", 0, 1e6))
    ops[2] = replace(ops[2], algorithms=menu, workspace_bytes=8 * MIB)
    plans = planner(replace(graph, ops=tuple(ops), tensors=tensors))
    # A copy takes about a second, op 2 ten if it is slow and next to nothing if it is fast.
    slow, fast = (spelled(plans.schedule(size), graph=graph) for size in (6 * MIB, UNLIMITED))
    assert slow.index((RUN, 2)) < slow.index((AWAIT_OFFLOAD, "y0")) < slow.index((RUN, 3))
    assert fast.index((RUN, 3)) < fast.index((AWAIT_OFFLOAD, "y0"))


# -- the whole


def test_ops_run_depth_first() -> None:
    graph = block(FIG_10)
    made = Dymem().plan(graph, DEVICE)
    check(graph, made)
    assert made.targets(RUN) == depth_first(graph) != tuple(range(len(graph.ops)))


MENUS = [(), (3 * MIB, MIB, 0), (50_000, 70_000, 20_000, 100)]


@given(networks(), devices(), st.sampled_from(MENUS), st.lists(st.floats(0.0, 1.2), min_size=2, max_size=4))
@EXAMPLES
def test_a_larger_budget_is_kept_and_never_slower(
    graph: Graph, device: Device, menu: tuple[int, ...], shares: list[float]
) -> None:
    graph = with_menu(graph, *menu) if menu else graph
    seconds = op_seconds(graph, device)
    plans = Planner(graph, device, seconds)
    top = check(graph, plans.schedule(UNLIMITED)).peak_bytes
    last = float("inf")
    for share in sorted(shares):
        budget = plans.floor_bytes + int(share * (top - plans.floor_bytes))
        made = Dymem().plan(graph, device, budget)
        assert check(graph, made).peak_bytes <= budget
        now = simulate(graph, made, device, seconds).step_seconds
        assert now <= last
        last = now


@given(networks())
@EXAMPLES
def test_below_its_floor_it_says_so(graph: Graph) -> None:
    floor = planner(graph).floor_bytes
    assert check(graph, Dymem().plan(graph, DEVICE, floor)).peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError) as caught:
        Dymem().plan(graph, DEVICE, floor - 1)
    assert (caught.value.floor_bytes, caught.value.budget_bytes) == (floor, floor - 1)


def test_without_a_budget_there_is_what_the_device_has_beside_its_context() -> None:
    graph = chain([POOL] * 6)
    floor = planner(graph).floor_bytes
    small = replace(DEVICE, memory_bytes=floor + 7, context_bytes=7)
    assert Dymem().plan(graph, small) == replace(Dymem().plan(graph, small, floor), budget_bytes=None)
    with pytest.raises(InfeasibleBudgetError):
        Dymem().plan(graph, replace(small, context_bytes=8))


def test_memory_optimal_algorithms_are_fixed_beforehand() -> None:
    graph = with_menu(chain([CONV, CONV]), 3 * MIB, MIB, 0)
    made = Dymem(memory_optimal=True).plan(graph, DEVICE)
    chosen = {i.algorithm for i in made.instructions if i.verb is RUN and graph.ops[i.target].algorithms}
    assert (made.policy, chosen) == ("dymem:m", {2})
