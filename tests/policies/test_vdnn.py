"""`vdnn-all` and `vdnn-conv` against the paper: which feature maps go, when, and when they come back (§III, Fig. 10)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, Layer, network, networks

from overspill.core import Graph, LayerType, Phase, Schedule, Verb
from overspill.policies.vdnn import VdnnAll, VdnnConv

EXAMPLES = settings(max_examples=40, deadline=None)
CONV, ACTV, POOL, FC = LayerType.CONV, LayerType.ACTIVATION, LayerType.POOL, LayerType.LINEAR
Chain = list[LayerType]
chains = st.lists(st.sampled_from([CONV, ACTV, POOL, FC]), min_size=2, max_size=14)


def chain(types: Chain) -> Graph:
    """Layer i reads the output of layer i-1 in forward, and again in its backward; the loss comes last."""
    return network([Layer(10_000, kind=kind) for kind in types])


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
