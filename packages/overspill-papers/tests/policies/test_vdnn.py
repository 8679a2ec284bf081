"""vDNN's policies against the paper: which feature maps go, when, when they come back (§III, Fig. 10), which algorithms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import chain, with_menu
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.core import Device, Graph, LayerType, Phase, Schedule, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds
from overspill.policies.base import Policy
from overspill.policies.in_core import Liveness
from overspill.simulate import check, simulate
from overspill_papers.policies.vdnn import Sequential, VdnnAll, VdnnConv, VdnnDynamic, VdnnFastest, downgraded

EXAMPLES = settings(max_examples=20, deadline=None)
CONV, ACTV, POOL, FC = LayerType.CONV, LayerType.ACTIVATION, LayerType.POOL, LayerType.LINEAR
Chain = list[LayerType]
chains = st.lists(st.sampled_from([CONV, ACTV, POOL, FC]), min_size=2, max_size=14)


def op_of(graph: Graph, layer: str, phase: Phase) -> int:
    return next(op.id for op in graph.ops if op.layer == layer and op.phase is phase)


def next_op(made: Schedule, verb: Verb, target: int) -> int:
    """The op that runs next after the only `verb` of `target`."""
    (index,) = (i for i, ins in enumerate(made.instructions) if (ins.verb, ins.target) == (verb, target))
    return next(ins.target for ins in made.instructions[index:] if ins.verb is Verb.RUN)


def figure_10(types: Chain, offloaded: set[int]) -> dict[int, int]:
    """For each offloaded layer that the search of Fig. 10 finds, the layer whose backward starts its prefetch."""
    every = [*types, LayerType.LOSS]
    prefetched: dict[int, int] = {}
    for current in range(len(every) - 1, -1, -1):
        for candidate in range(current - 1, -1, -1):
            if candidate in offloaded and candidate not in prefetched:
                prefetched[candidate] = current
                break
            if every[candidate] is CONV:
                break
    return prefetched


@pytest.mark.parametrize("policy", [VdnnAll, VdnnConv])
@given(types=chains)
@EXAMPLES
def test_a_chain_is_offloaded_and_prefetched_as_in_the_paper(policy: type[VdnnAll], types: Chain) -> None:
    graph = chain(types)
    made = policy().plan(graph, DEVICE)
    wanted = {CONV} if policy is VdnnConv else {CONV, POOL, FC}
    offloaded = {i for i, kind in enumerate(types) if i > 0 and kind in wanted}  # the first layer's input stays
    inputs = {i: next(t.id for t in graph.tensors if t.name == f"y{i - 1}") for i in offloaded}
    assert set(made.targets(Verb.OFFLOAD)) == set(inputs.values())
    found = figure_10(types, offloaded)
    names = [f"l{i}" for i in range(len(types))] + ["loss"]
    for layer, tensor in inputs.items():
        forward, backward = (op_of(graph, names[layer], phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        assert next_op(made, Verb.OFFLOAD, tensor) == forward
        assert next_op(made, Verb.AWAIT_OFFLOAD, tensor) == forward + 1
        starter = op_of(graph, names[found[layer]], Phase.BACKWARD) if layer in found else backward
        assert next_op(made, Verb.PREFETCH, tensor) == starter
        assert next_op(made, Verb.AWAIT_PREFETCH, tensor) == (starter + 1 if layer in found else backward)


def test_the_prefetch_starts_with_the_backward_of_the_nearest_later_convolution() -> None:
    types = [CONV, ACTV, CONV, ACTV, POOL, CONV, ACTV, CONV]
    graph = chain(types)
    made = VdnnConv().plan(graph, DEVICE)
    for layer, later in ((2, 5), (5, 7)):
        tensor = next(t.id for t in graph.tensors if t.name == f"y{layer - 1}")
        assert next_op(made, Verb.PREFETCH, tensor) == op_of(graph, f"l{later}", Phase.BACKWARD)


def test_the_last_reader_decides_where_a_feature_map_forks() -> None:
    def moved(last: LayerType) -> tuple[Graph, Schedule, int]:
        graph = network(
            [Layer(10_000, CONV), Layer(10_000, CONV), Layer(10_000, last, skips=(0,)), Layer(10_000, CONV)]
        )
        return graph, VdnnConv().plan(graph, DEVICE), next(t.id for t in graph.tensors if t.name == "y0")

    graph, made, fork = moved(CONV)
    assert next_op(made, Verb.OFFLOAD, fork) == op_of(graph, "l2", Phase.FORWARD)
    _, made, fork = moved(POOL)
    assert fork not in made.targets(Verb.OFFLOAD)


@given(networks())
@EXAMPLES
def test_vdnn_conv_offloads_only_what_a_convolution_was_the_last_to_read_in_forward(graph: Graph) -> None:
    for tensor in VdnnConv().plan(graph, DEVICE).targets(Verb.OFFLOAD):
        reader = graph.last_forward_use(tensor)
        assert reader is not None
        assert graph.ops[reader].layer_type is CONV


@given(networks())
@EXAMPLES
def test_vdnn_all_moves_at_least_what_vdnn_conv_moves(graph: Graph) -> None:
    every, conv = (set(policy().plan(graph, DEVICE).targets(Verb.OFFLOAD)) for policy in (VdnnAll, VdnnConv))
    assert every >= conv


@given(networks())
@EXAMPLES
def test_what_goes_comes_back_once(graph: Graph) -> None:
    for policy in (VdnnAll, VdnnConv):
        made = policy().plan(graph, DEVICE)
        sent = sorted(made.targets(Verb.OFFLOAD))
        assert sent == sorted(made.targets(Verb.PREFETCH)) == sorted(set(sent))


# -- vdnn-dynamic


def peak(graph: Graph, policy: Policy) -> int:
    return check(graph, policy.plan(graph, DEVICE)).peak_bytes


def choices(made: Schedule) -> list[int]:
    return [i.algorithm for i in made.instructions if i.verb is Verb.RUN]


MIXED = with_menu(chain([CONV, POOL, CONV, CONV, POOL, POOL, CONV]), 40_000, 20_000, 0)
LEAST = VdnnAll(memory_optimal=True)


QUICK = replace(DEVICE, offload_bytes_per_second=1e15, prefetch_bytes_per_second=1e15, transfer_latency_seconds=0.0)


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        pytest.param(VdnnDynamic(), DEVICE, id="the first that fits"),
        pytest.param(VdnnFastest(), QUICK, id="the fastest where transfers are quick"),
    ],
)
def test_passes_come_in_the_order_of_the_paper(policy: Policy, device: Device) -> None:
    all_m, all_p, conv_p, none_p = (peak(MIXED, p) for p in (LEAST, VdnnAll(), VdnnConv(), Liveness()))
    assert all_m < all_p < conv_p < none_p
    for budget, same, passed in (
        (none_p, Liveness(), "none"), (none_p - 1, VdnnConv(), "conv"), (conv_p, VdnnConv(), "conv"),
        (conv_p - 1, VdnnAll(), "all"), (all_p, VdnnAll(), "all"),
    ):  # fmt: skip
        made, chosen = policy.plan(MIXED, device, budget), f"{policy.name}:pass={passed}"
        assert made == replace(same.plan(MIXED, device), policy=chosen, budget_bytes=budget)


def test_where_transfers_are_slow_the_fastest_is_a_later_pass_that_moves_less() -> None:
    all_p = peak(MIXED, VdnnAll())
    seconds = op_seconds(MIXED, DEVICE)
    fastest, paper = (policy.plan(MIXED, DEVICE, all_p) for policy in (VdnnFastest(), VdnnDynamic()))
    assert len(fastest.targets(Verb.OFFLOAD)) < len(paper.targets(Verb.OFFLOAD))
    assert simulate(MIXED, fastest, DEVICE, seconds).step_seconds < simulate(MIXED, paper, DEVICE, seconds).step_seconds


def test_the_last_phase_tries_conv_before_all_and_downgrades_only_what_overflows() -> None:
    all_p = peak(MIXED, VdnnAll())
    made = VdnnDynamic().plan(MIXED, DEVICE, all_p - 1)
    assert made.targets(Verb.OFFLOAD) == VdnnConv().plan(MIXED, DEVICE).targets(Verb.OFFLOAD)
    # Ops 0 to 7 are forward, 8 to 15 backward; layers 0, 2, 3 and 6 are convolutions.
    assert choices(made) == [0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 1, 1, 0, 0]
    conv_g = check(MIXED, made).peak_bytes
    made = VdnnDynamic().plan(MIXED, DEVICE, conv_g - 1)
    assert made.targets(Verb.OFFLOAD) == VdnnAll().plan(MIXED, DEVICE).targets(Verb.OFFLOAD)
    assert choices(made) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0]


def test_vdnn_all_with_memory_optimal_algorithms_decides_what_can_be_trained() -> None:
    floor = peak(MIXED, LEAST)
    assert check(MIXED, VdnnDynamic().plan(MIXED, DEVICE, floor)).peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError) as caught:
        VdnnDynamic().plan(MIXED, DEVICE, floor - 1)
    assert (caught.value.floor_bytes, caught.value.budget_bytes) == (floor, floor - 1)
    assert "minimum of policy vdnn-dynamic" in str(caught.value)


def test_without_a_budget_there_is_what_the_device_has_beside_its_context() -> None:
    for room in (peak(MIXED, VdnnAll()), peak(MIXED, VdnnConv())):
        device = replace(DEVICE, memory_bytes=room + 7, context_bytes=7)
        made = VdnnDynamic().plan(MIXED, device)
        assert made == replace(VdnnDynamic().plan(MIXED, device, room), budget_bytes=None)
    with pytest.raises(InfeasibleBudgetError):
        VdnnDynamic().plan(MIXED, replace(DEVICE, memory_bytes=peak(MIXED, LEAST) + 6, context_bytes=7))


def test_an_op_is_downgraded_step_by_step_until_it_fits_or_is_memory_optimal() -> None:
    build = Build()
    for _ in range(5):
        build.op([], [build.tensor(10)], kind=CONV)
    graph = with_menu(build.graph(), 100, 60, 5, 20)
    made = Schedule("by hand", Liveness().plan(graph, DEVICE).instructions[::2])  # the Runs, without their Frees
    beside = [0, 1, 41, 96, 90]  # live bytes beside the workspace
    assert choices(downgraded(graph, made, [100 + nbytes for nbytes in beside], 100)) == [0, 1, 2, 2, 2]


@given(networks(), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
@EXAMPLES
def test_vdnn_dynamic_keeps_to_its_budget_with_every_menu(graph: Graph, share: float) -> None:
    graph = with_menu(graph, 50_000, 70_000, 20_000, 100)
    floor, top = peak(graph, LEAST), peak(graph, Liveness())
    budget = floor + int(share * (top - floor))
    assert check(graph, VdnnDynamic().plan(graph, DEVICE, budget)).peak_bytes <= budget


# -- sequential


@given(networks(), devices(max_share=0.0))
@EXAMPLES
def test_one_stream_hides_nothing(graph: Graph, device: Device) -> None:
    made = Sequential().plan(graph, device)
    timeline = simulate(graph, made, device, op_seconds(graph, device))
    assert set(made.targets(Verb.OFFLOAD)) == set(VdnnAll().plan(graph, device).targets(Verb.OFFLOAD))
    assert timeline.step_seconds == pytest.approx(timeline.compute_seconds + timeline.transfer_seconds)


def test_one_stream_sends_behind_the_layer_and_fetches_in_front_of_its_backward() -> None:
    graph = chain([CONV, CONV])
    made = Sequential().plan(graph, DEVICE)
    y0 = next(t.id for t in graph.tensors if t.name == "y0")
    y1 = next(t.id for t in graph.tensors if t.name == "y1")
    l1, loss = op_of(graph, "l1", Phase.FORWARD), op_of(graph, "loss", Phase.FORWARD)
    away, back = (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.FREE), (Verb.PREFETCH, Verb.AWAIT_PREFETCH)
    spelled = [(i.verb, i.target) for i in made.instructions]
    behind = spelled.index((Verb.RUN, l1)) + 1
    assert spelled[behind : behind + 3] == [(verb, y0) for verb in away]
    in_front = spelled.index((Verb.RUN, op_of(graph, "l1", Phase.BACKWARD)))
    assert spelled[in_front - 2 : in_front] == [(verb, y0) for verb in back]
    # What the loss reads goes and comes between its forward and its backward, if there is anything between.
    assert (Verb.OFFLOAD, y1) not in spelled
    assert spelled.index((Verb.RUN, loss)) == behind + 3
