"""MXNet's step read from a symbol: by hand on small networks, and laws of its memory plan on large ones."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from overspill.core import Phase, TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.devices import load_device
from overspill_papers.capture.mxnet.backward import MxnetStep, training_step
from overspill_papers.capture.mxnet.executor import record
from overspill_papers.capture.mxnet.memory_plan import EXTERNAL, ITEM_BYTES, MemoryPlan
from overspill_papers.capture.mxnet.symbol import NodeOutput, Symbol, read_symbol, symbol_of
from overspill_papers.papers.symbols import Builder, bert, inception_v3, lstm, resnet50, vgg16

P40 = load_device("p40")
BATCH = 4
IMAGES = {"data": (BATCH, 3, 8, 8), "softmax_label": (BATCH,)}


def small() -> Symbol:
    net = Builder()
    x = net.relu("relu", net.convolution("conv", net.variable("data"), 16, (3, 3), bias=True, pad=(1, 1)))
    x = net.add("Flatten", "flatten", net.pool("pool", x, "max", 2, 2))
    return net.loss(net.dense("fc", x, 10))


def place(step: MxnetStep, name: str, index: int = 0) -> NodeOutput:
    return NodeOutput(next(i for i, node in enumerate(step.nodes) if node.name == name), index)


def test_a_symbol_is_the_same_after_a_round_through_its_file(tmp_path: Path) -> None:
    path = tmp_path / "net-symbol.json"
    path.write_text(resnet50().to_json(), encoding="utf-8")
    assert read_symbol(path) == resnet50()
    assert json.loads(path.read_text())["arg_nodes"][0] == 0


def test_attributes_of_old_files_are_read_too() -> None:
    nodes = [{"op": "null", "name": "x", "inputs": []}]
    nodes.append(
        {"op": "Activation", "name": "a", "param": {"act_type": "relu"}, "attr": {"lr": "1"}, "inputs": [[0, 0]]}
    )
    assert symbol_of({"nodes": nodes, "heads": [[1, 0]]}).nodes[1].attrs == {"act_type": "relu", "lr": "1"}


def test_the_plan_of_a_small_network_is_what_one_finds_by_hand() -> None:
    step = training_step(small(), IMAGES)
    plan = MemoryPlan(step)
    where = plan.storage
    map_, pooled = ITEM_BYTES * BATCH * 16 * 8 * 8, ITEM_BYTES * BATCH * 16 * 4 * 4
    # Activations are in place, views are no copies, softmax is in place, and so is its gradient.
    assert where[place(step, "conv")] == where[place(step, "relu")]
    assert where[place(step, "pool")] == where[place(step, "flatten")]
    assert where[place(step, "fc")] == where[place(step, "softmax")]
    # The pooled map goes to its own gradient (FullyConnected's pair of input 1 and output 0) only when nothing reads it.
    gradient = place(step, "fc_backward")
    assert where[gradient] != where[place(step, "pool")]
    # Its weight's gradient lies in an array of its own.
    assert where[NodeOutput(gradient.node, 1)] == EXTERNAL
    assert step.gradients.keys() == {"conv_weight", "conv_bias", "fc_weight", "fc_bias"}
    assert plan.nbytes[where[place(step, "conv")]] == map_
    assert plan.nbytes[where[place(step, "pool")]] == pooled
    # Beside the two maps: gradients of both, in the map of the convolution's gradient that of the image.
    sizes = sorted(plan.nbytes.values())
    assert sizes[-2:] == [map_, map_]


def test_backward_runs_from_the_loss_to_the_first_layer_and_weights_never_lie_in_the_plan() -> None:
    step = training_step(small(), IMAGES)
    backward = [node.name for node, forward in zip(step.nodes, step.forward, strict=True) if forward is not None]
    assert backward == ["softmax_backward", "fc_backward", "flatten_backward", "pool_backward", "relu_backward", "conv_backward"]  # fmt: skip
    plan = MemoryPlan(step)
    for i, node in enumerate(step.nodes):
        if node.is_variable:
            assert plan.storage[NodeOutput(i, 0)] == EXTERNAL


def test_the_recording_has_every_array_once_and_forward_alone_has_no_gradients() -> None:
    recording = record(small(), IMAGES, P40, optimizer="momentum")
    by_kind: dict[TensorKind, int] = defaultdict(int)
    for allocation in recording.allocations:
        by_kind[allocation.kind] += allocation.nbytes
    weights = ITEM_BYTES * (16 * 3 * 9 + 16 + 10 * 256 + 10)
    assert (
        by_kind[TensorKind.PARAMETER] == by_kind[TensorKind.GRADIENT] == by_kind[TensorKind.OPTIMIZER_STATE] == weights
    )
    assert by_kind[TensorKind.INPUT] == ITEM_BYTES * (prod(IMAGES["data"]) + BATCH)
    assert recording.parameters * ITEM_BYTES == weights
    assert {op.phase for op in recording.ops} == set(Phase)
    inference = record(small(), IMAGES, P40, optimizer=None)
    assert {op.phase for op in inference.ops} == {Phase.FORWARD}
    assert not any(a.kind is TensorKind.GRADIENT for a in inference.allocations)


def test_temporary_space_is_one_and_as_large_as_the_largest_that_was_asked_for() -> None:
    recording = record(vgg16(), {"data": (32, 3, 224, 224), "softmax_label": (32,)}, P40)
    spaces = [a for a in recording.allocations if a.kind is TensorKind.WORKSPACE]
    assert spaces
    assert all(before.end < after.start for before, after in pairwise(spaces))
    assert spaces[-1].nbytes == max(space.nbytes for space in spaces) <= 1 << 30


@pytest.mark.parametrize(("steps", "chains"), [(3, 0), (12, 1)])
def test_gradients_of_a_shared_weight_are_summed_and_many_of_them_in_one_place(steps: int, chains: int) -> None:
    inputs = {"data": (steps, 2, 8), "lstm0_begin_h": (2, 8), "lstm0_begin_c": (2, 8)}
    step = training_step(lstm(8, steps, 1), inputs)
    plan = MemoryPlan(step)
    adds = [i for i, node in enumerate(step.nodes) if node.op == "_grad_add"]
    assert bool(adds) == bool(chains)
    for i in adds:
        total, part = step.nodes[i].inputs
        assert plan.storage[total] == plan.storage[part] == plan.storage[NodeOutput(i, 0)]


NETWORKS = {
    "vgg16": (vgg16(), {"data": (2, 3, 64, 64), "softmax_label": (2,)}),
    "resnet50": (resnet50(), {"data": (2, 3, 64, 64), "softmax_label": (2,)}),
    "inception-v3": (inception_v3(), {"data": (2, 3, 139, 139), "softmax_label": (2,)}),
    "bert": (
        bert(layers=2, width=32, heads=4, words=50),
        {
            **dict.fromkeys(("data", "segments", "positions"), (2, 6)), "softmax_label": (2,),
            **dict.fromkeys(("mask", "minus_infinity"), (8, 6, 6)),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_no_two_entries_lie_in_one_storage_at_the_same_time(name: str) -> None:
    symbol, inputs = NETWORKS[name]
    step = training_step(symbol, inputs)
    plan = MemoryPlan(step)
    last: dict[NodeOutput, int] = {}
    for i, node in enumerate(step.nodes):
        for entry in node.inputs:
            last[entry] = i
    for entry in (*step.heads, *step.gradients.values()):
        last[entry] = len(step.nodes)
    tenants: dict[int, list[NodeOutput]] = defaultdict(list)
    for entry, storage in sorted(plan.storage.items()):
        if storage >= 0:
            assert plan.nbytes[storage] >= ITEM_BYTES * prod(step.shapes[entry.node][entry.number])
            tenants[storage].append(entry)
    for entries in tenants.values():
        for before, after in pairwise(entries):
            end, operator = last.get(before, before.node), step.of[after.node]
            shares = before in step.nodes[after.node].inputs and operator is not None
            assert end < after.node or (shares and (end == after.node or operator.is_view))


def test_the_networks_have_the_parameters_that_the_papers_say() -> None:
    counts = {
        "vgg16": 138_357_544, "resnet50": 25_557_032, "inception-v3": 23_834_568,
    }  # fmt: skip
    for name, count in counts.items():
        symbol, _ = NETWORKS[name]
        side = 299 if name == "inception-v3" else 224
        step = training_step(symbol, {"data": (1, 3, side, side), "softmax_label": (1,)})
        assert sum(prod(step.shapes[entry.node][entry.number]) for entry in step.gradients.values()) == count
    whole = training_step(bert(), {**NETWORKS["bert"][1], **dict.fromkeys(("mask", "minus_infinity"), (24, 6, 6))})
    assert sum(prod(whole.shapes[e.node][e.number]) for e in whole.gradients.values()) == 109_483_778


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    for text, why in (("{}", "KeyError"), ("nonsense", "JSONDecodeError"), ('{"nodes": [], "heads": []}', "no heads")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match=f"symbol file .*{why}"):
            read_symbol(path)
    with pytest.raises(RequestError, match="cannot read"):
        read_symbol(tmp_path / "nothing.json")
    with pytest.raises(RequestError, match=r"'date'; .*data, conv_weight"):
        record(small(), {"date": (1,)}, P40)
    with pytest.raises(RequestError, match="adafactor"):
        record(small(), IMAGES, P40, optimizer="adafactor")
    with pytest.raises(UnsupportedError, match=r"conv \(Convolution\)"):
        record(small(), {"softmax_label": (4,)}, P40)
    net = Builder()
    with pytest.raises(UnsupportedError, match="Warp of MXNet"):
        record(net.made(net.add("Warp", "w", net.variable("data"))), {"data": (1,)}, P40)
