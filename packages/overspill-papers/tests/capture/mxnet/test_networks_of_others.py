"""Symbols with the structure that MXNet's own layers export; counts and shapes are those that MXNet 1.9.1 infers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from overspill.capture.recording.recording import Recording
from overspill.core import TensorKind
from overspill.core.errors import UnsupportedError
from overspill.devices import load_device
from overspill_papers.capture.mxnet.backward import training_step
from overspill_papers.capture.mxnet.executor import record
from overspill_papers.capture.mxnet.shapes import Shape
from overspill_papers.capture.mxnet.symbol import VARIABLE, Node, NodeOutput, Symbol, symbol_of
from overspill_papers.papers.symbols import Builder

P40 = load_device("p40")
STEPS, BATCH, WIDTH, STATE = 9, 2, 12, 16


class Net(Builder):
    """A builder that also has variables with attributes, as gluon's have."""

    def shaped(self, name: str, shape: str) -> NodeOutput:
        return self._add(Node(VARIABLE, name, (), {"__shape__": shape, "__dtype__": "0"}))


def gluon_layer(mode: str, layers: int = 2, *, layout: str = "TNC", bidirectional: bool = False) -> Symbol:
    """gluon.rnn's layers before their first batch: weights of each layer reshaped and joined, states of zeros."""
    net, gates = Net(), {"lstm": 4, "gru": 3, "rnn_tanh": 1}[mode]
    directions = "lr" if bidirectional else "l"
    x = net.variable("data")
    if layout == "NTC":
        x = net.add("SwapAxis", "swapaxes0", x, dim1=0, dim2=1)
    flat = []
    for part in ("weight", "bias"):
        for layer in range(layers):
            for direction in directions:
                for kind in ("i2h", "h2h"):
                    width = STATE if kind == "h2h" else 0 if not layer else STATE * len(directions)
                    shape = f"({gates * STATE}, {width})" if part == "weight" else f"({gates * STATE},)"
                    weight = net.shaped(f"{direction}{layer}_{kind}_{part}", shape)
                    flat.append(net.add("Reshape", f"reshape{len(flat)}", weight, shape="-1"))
    parameters = net.add("_rnn_param_concat", "concat", *flat, dim=0, num_args=len(flat))
    zeros = [
        net.add("_zeros", f"zeros{i}", shape=f"({layers * len(directions)}, 0, {STATE})", ctx="cpu(0)", dtype="float32")
        for i in range(2 if mode == "lstm" else 1)
    ]  # fmt: skip
    made = net.add("RNN", "rnn", x, parameters, *zeros, state_size=STATE, num_layers=layers, mode=mode, p=0.2,
                   bidirectional=bidirectional, state_outputs=True, projection_size=None)  # fmt: skip
    if layout == "NTC":
        made = net.add("SwapAxis", "swapaxes1", made, dim1=0, dim2=1)
    return net.made(made)


def fused_cell(mode: str) -> Symbol:
    """mx.rnn.FusedRNNCell in a language model: one vector of parameters, whose size the operator infers."""
    net = Net()
    x = net.layer("Embedding", "embed", net.variable("data"), ("weight",), input_dim=50, output_dim=WIDTH)
    states = [
        net.add("_zeros", f"begin_state_{i}", shape=f"(2, 0, {STATE})") for i in range(2 if mode == "lstm" else 1)
    ]
    x = net.add("RNN", "rnn", x, net.variable("parameters"), *states, state_size=STATE, num_layers=2, mode=mode,
                state_outputs=False)  # fmt: skip
    x = net.dense("pred", net.add("Reshape", "reshape0", x, shape=f"(-1, {STATE})"), 50)
    label = net.add("Reshape", "reshape1", net.variable("softmax_label"), shape="(-1,)")
    return net.made(net.add("SoftmaxOutput", "softmax", x, label))


def cells() -> Symbol:
    """The bucketing example: an LSTM of cells, unrolled, whose first states are zeros for a batch not yet known."""
    net = Net()
    steps = net.add("SliceChannel", "slice", net.variable("data"), num_outputs=STEPS, axis=0, squeeze_axis=True)
    h, c = (net.add("_zeros", f"begin_state_{i}", shape=f"(0, {STATE})") for i in range(2))
    outputs = []
    for t in range(STEPS):
        step = NodeOutput(steps.node, t)
        i2h, h2h = (
            net.add("FullyConnected", f"t{t}_{name}", read, net.variable(f"{name}_weight"), net.variable(f"{name}_bias"),
                    num_hidden=4 * STATE)
            for name, read in (("i2h", step), ("h2h", h))
        )  # fmt: skip
        parts = net.add("SliceChannel", f"t{t}_parts", net.add("elemwise_add", f"t{t}_plus", i2h, h2h), num_outputs=4)
        gates = [net.add("Activation", f"t{t}_{k}", NodeOutput(parts.node, k), act_type="sigmoid") for k in range(4)]
        kept = net.add("elemwise_mul", f"t{t}_mul0", gates[1], c)
        c = net.add("elemwise_add", f"t{t}_c", kept, net.add("elemwise_mul", f"t{t}_mul1", gates[0], gates[2]))
        h = net.add("elemwise_mul", f"t{t}_h", gates[3], net.add("Activation", f"t{t}_tanh", c, act_type="tanh"))
        outputs.append(h)
    return net.made(net.add("stack", "outputs", *outputs, axis=0, num_args=STEPS))


def fully_convolutional() -> Symbol:
    """FCN: a deconvolution whose map is cropped to the image's size, and a softmax on every pixel."""
    net = Net()
    image = net.variable("data")
    x = net.pool(
        "pool1", net.relu("relu1", net.convolution("conv1", image, 8, (3, 3), bias=True, pad=(100, 100))), "max", 2, 2
    )
    x = net.convolution("score", x, 5, (1, 1), bias=True)
    x = net.layer("Deconvolution", "bigscore", x, ("weight",), kernel=(4, 4), stride=(2, 2), adj=(1, 1), num_filter=5,
                  no_bias=True)  # fmt: skip
    x = net.add("Crop", "upscore", x, image, offset=(19, 19), num_args=2)
    return net.made(net.add("SoftmaxOutput", "softmax", x, net.variable("softmax_label"), multi_output=True))


def generator() -> Symbol:
    """DCGAN's generator."""
    net, x = Net(), NodeOutput(0, 0)
    x = net.variable("data")
    for i, (filters, stride, pad) in enumerate(((32, 1, 0), (16, 2, 1), (8, 2, 1), (3, 2, 1))):
        x = net.layer("Deconvolution", f"deconv{i}", x, ("weight",), kernel=(4, 4), stride=(stride, stride),
                      pad=(pad, pad), num_filter=filters, no_bias=True)  # fmt: skip
        x = net.relu(f"relu{i}", net.batch_norm(f"bn{i}", x)) if i < 3 else net.add("tanh", "out", x)
    return net.made(x)


def pyramid() -> Symbol:
    """PSPNet's head: pooling to sizes of its own, resizing back by number, and joining."""
    net, x = Net(), NodeOutput(0, 0)
    x = net.convolution("conv", net.variable("data"), 8, (3, 3), pad=(1, 1))
    parts = [x]
    for size in (1, 2, 3, 6):
        pooled = net.add("_contrib_AdaptiveAvgPooling2D", f"pool{size}", x, output_size=f"({size}, {size})")
        y = net.relu(f"relu{size}", net.convolution(f"conv{size}", pooled, 2, (1, 1)))
        parts.append(net.add("_contrib_BilinearResize2D", f"up{size}", y, height=24, width=24))
    x = net.add("Concat", "concat", *parts, dim=1, num_args=5)
    return net.made(net.add("_contrib_BilinearResize2D", "up", net.convolution("out", x, 4, (1, 1)), scale_height=2.0,
                            scale_width=2.0))  # fmt: skip


def squeezed() -> Symbol:
    """SE's block: channels weighted by what a pooled map says."""
    net = Net()
    x = net.convolution("conv", net.variable("data"), 16, (3, 3), pad=(1, 1))
    y = net.add("_contrib_AdaptiveAvgPooling2D", "pool", x)
    y = net.add("relu", "relu", net.convolution("down", y, 4, (1, 1), bias=True))
    y = net.add("sigmoid", "sigmoid", net.convolution("up", y, 16, (1, 1), bias=True))
    return net.made(net.add("mean", "loss", net.add("broadcast_mul", "scale", x, y), axis=0, exclude=True))


def regression() -> Symbol:
    """Gluon's dense net with normalisations, PReLU, and the loss of Huber as its code writes it."""
    net = Net()
    x = net.layer("LeakyReLU", "prelu", net.dense("dense", net.variable("data"), 10), ("alpha",), act_type="prelu")
    x = net.layer("LayerNorm", "ln", x, ("gamma", "beta"))
    x = net.layer(
        "InstanceNorm", "in", net.add("elemwise_mul", "swish", x, net.add("sigmoid", "s", x)), ("gamma", "beta")
    )
    label = net.add("reshape_like", "like", net.variable("label"), x)
    far = net.add("abs", "abs", net.add("elemwise_sub", "minus", x, label))
    near = net.add("_mul_scalar", "half", net.add("square", "square", far), scalar=0.5)
    huber = net.add("where", "where", net.add("_greater_scalar", "is_far", far, scalar=1), net.add("_minus_scalar", "f", far,
                    scalar=0.5), near)  # fmt: skip
    return net.made(net.add("mean", "loss", huber, axis=0, exclude=True))


DATA = (STEPS, BATCH, WIDTH)
NETWORKS: dict[str, tuple[Callable[[], Symbol], dict[str, Shape], int, Shape]] = {
    "gluon LSTM": (lambda: gluon_layer("lstm"), {"data": DATA}, 4096, (STEPS, BATCH, STATE)),
    "gluon LSTM, both ways, batch first": (
        lambda: gluon_layer("lstm", layout="NTC", bidirectional=True), {"data": (BATCH, STEPS, WIDTH)}, 10240,
        (BATCH, STEPS, 2 * STATE),
    ),
    "gluon GRU, both ways": (
        lambda: gluon_layer("gru", bidirectional=True), {"data": DATA}, 7680, (STEPS, BATCH, 2 * STATE),
    ),
    "gluon RNN": (lambda: gluon_layer("rnn_tanh"), {"data": DATA}, 1024, (STEPS, BATCH, STATE)),
    "fused LSTM": (
        lambda: fused_cell("lstm"), dict.fromkeys(("data", "softmax_label"), (STEPS, BATCH)), 5546, (STEPS * BATCH, 50),
    ),
    "fused GRU": (
        lambda: fused_cell("gru"), dict.fromkeys(("data", "softmax_label"), (STEPS, BATCH)), 4522, (STEPS * BATCH, 50),
    ),
    "LSTM of cells": (cells, {"data": DATA}, 1920, (STEPS, BATCH, STATE)),
    "FCN": (
        fully_convolutional, {"data": (BATCH, 3, 32, 32), "softmax_label": (BATCH, 1024)}, 669, (BATCH, 5, 32, 32)),
    "DCGAN": (generator, {"data": (BATCH, 10, 1, 1)}, 15856, (BATCH, 3, 32, 32)),
    "PSPNet": (pyramid, {"data": (BATCH, 3, 24, 24)}, 344, (BATCH, 4, 48, 48)),
    "SENet": (squeezed, {"data": (BATCH, 3, 8, 8)}, 580, (BATCH,)),
    "Huber": (regression, {"data": (BATCH, 7), "label": (BATCH, 10)}, 130, (BATCH,)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_outputs_have_the_shapes_that_mxnet_infers(name: str) -> None:
    build, inputs, parameters, made = NETWORKS[name]
    symbol = symbol_of(json.loads(build().to_json()))
    step = training_step(symbol, inputs)
    (head,) = step.heads
    assert step.shapes[head.node][head.number] == made
    assert record(symbol, inputs, P40).parameters == parameters
    forward = record(symbol, inputs, P40, optimizer=None)
    assert not any(a.kind is TensorKind.GRADIENT for a in forward.allocations)


def named(recording: Recording, name: str) -> list[int]:
    return [a.nbytes for a in recording.allocations if a.name == name]


def test_a_recurrent_layer_keeps_gates_and_states_for_backward_and_unread_states_have_zeros_as_gradients() -> None:
    recording = record(gluon_layer("lstm"), {"data": DATA}, P40)
    kept = 4 * STEPS * BATCH * STATE * 2 * (4 + 2)
    assert named(recording, "reserve of rnn") == [kept]
    (reserve,) = (a for a in recording.allocations if a.name == "reserve of rnn")
    assert reserve.end == recording.events
    assert not named(record(gluon_layer("lstm"), {"data": DATA}, P40, optimizer=None), "reserve of rnn")
    backward = training_step(gluon_layer("lstm"), {"data": DATA})
    (node,) = (node for node in backward.nodes if node.op == "_backward_RNN")
    read = [backward.nodes[entry.node].op for entry in node.inputs]
    # data, parameters, states, output, three gradients, and the states that the layer returns
    assert read == [
        VARIABLE,
        "_rnn_param_concat",
        "_zeros",
        "RNN",
        VARIABLE,
        "_zeros",
        "_zeros",
        "RNN",
        "_zeros",
        "RNN",
    ]


def test_a_shape_that_nothing_tells_is_named() -> None:
    net = Net()
    net.made(net.add("SwapAxis", "swap", net.add("_zeros", "zeros", shape="(0, 3)")))
    with pytest.raises(UnsupportedError, match="of swap"):
        training_step(net.made(NodeOutput(1, 0)), {})
