"""The shapes of MXNet's layers: of their outputs, and of weights that they infer (see `shapes.py`)."""

from __future__ import annotations

from math import prod

from .shapes import Shape, Shapes, concat, fill, known
from .symbol import Node

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""The number of gates of each mode of RNN."""


def convolution(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    kernel = node.numbers("kernel")
    ones = (1,) * len(kernel)
    stride, dilate, pad = (
        node.numbers("stride", ones),
        node.numbers("dilate", ones),
        node.numbers("pad", (0,) * len(kernel)),
    )
    filters = node.number("num_filter", 0)
    # Weight and bias, then the output.
    fill(shapes, 1, (filters, data[1] // node.number("num_group", 1), *kernel))
    fill(shapes, 2, (filters,))
    image = tuple(
        (size + 2 * p - (d * (k - 1) + 1)) // s + 1
        for size, p, d, k, s in zip(data[2:], pad, dilate, kernel, stride, strict=True)
    )
    return [(data[0], filters, *image)]


def deconvolution(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    kernel = node.numbers("kernel")
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    filters = node.number("num_filter", 0)
    fill(shapes, 1, (data[1], filters // node.number("num_group", 1), *kernel))
    fill(shapes, 2, (filters,))
    sizes = zip(
        data[2:], kernel, node.numbers("stride", ones), node.numbers("dilate", ones), node.numbers("pad", zeros),
        node.numbers("adj", zeros), strict=True,
    )  # fmt: skip
    image = tuple((size - 1) * s + d * (k - 1) + 1 - 2 * p + adj for size, k, s, d, p, adj in sizes)
    return [(data[0], filters, *(node.numbers("target_shape") or image))]


def pooling(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    if node.flag("global_pool"):
        return [(*data[:2], *(1 for _ in data[2:]))]
    kernel = node.numbers("kernel")
    stride, pad = node.numbers("stride", (1,) * len(kernel)), node.numbers("pad", (0,) * len(kernel))
    if node.attrs.get("pooling_convention") == "same":
        return [(*data[:2], *(-(-size // s) for size, s in zip(data[2:], stride, strict=True)))]
    full = node.attrs.get("pooling_convention", "valid") == "full"
    image = tuple(
        (size + 2 * p - k + (s - 1 if full else 0)) // s + 1
        for size, p, k, s in zip(data[2:], pad, kernel, stride, strict=True)
    )
    return [(*data[:2], *image)]


def adaptive_pooling(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    size = node.numbers("output_size", (1,))
    return [(*data[:2], *(size * 2 if len(size) == 1 else size))]


def fully_connected(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    hidden = node.number("num_hidden", 0)
    flat = node.flag("flatten", default=True)
    fill(shapes, 1, (hidden, prod(data[1:]) if flat else data[-1]))
    fill(shapes, 2, (hidden,))
    return [(data[0], hidden) if flat else (*data[:-1], hidden)]


def recurrent(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shapes of RNN (`rnn.cc`, RNNShape). Its parameters are one vector, and it infers its states."""
    steps, batch, width = known(node, shapes)
    state, mode = node.number("state_size", 0), node.attrs["mode"]
    directions = 2 if node.flag("bidirectional") else 1
    layers = directions * node.number("num_layers", 1)
    made = node.number("projection_size", 0) if node.attrs.get("projection_size", "None") != "None" else state
    per_gate = (width + made + 2) * directions + (made * directions + made + 2) * (layers - directions)
    projected = made * state * layers if made != state else 0
    fill(shapes, 1, (per_gate * state * GATES[mode] + projected,))
    fill(shapes, 2, (layers, batch, made))
    if mode == "lstm":
        fill(shapes, 3, (layers, batch, state))
    if node.flag("use_sequence_length"):
        fill(shapes, len(shapes) - 1, (batch,))
    states = [(layers, batch, made), (layers, batch, state)][: 2 if mode == "lstm" else 1]
    return [(steps, batch, directions * made), *(states if node.flag("state_outputs") else [])]


def parameter_concat(node: Node, shapes: Shapes) -> list[Shape]:
    return concat(node, shapes, 0)


def parts_of_parameters(node: Node, read: Shapes, made: Shapes) -> None:
    """Share what is left of RNN's parameters among vectors of unknown size (`nn/concat.cc`, RNNParamConcatShape)."""
    whole = made[0] if made else None
    unknown = [i for i, shape in enumerate(read) if shape is None or 0 in shape]
    if whole is not None and unknown and node.number("dim", 0) == 0:
        rest = whole[0] - sum(shape[0] for i, shape in enumerate(read) if shape is not None and i not in unknown)
        for i in unknown:
            read[i] = (rest // len(unknown),)


def batch_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    channels = (data[node.number("axis", 1)],)
    for index in range(1, 5):
        fill(shapes, index, channels)
    return [data, channels, channels]


def layer_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axis = node.number("axis", -1) % len(data)
    for index in (1, 2):
        fill(shapes, index, (data[axis],))
    rest = tuple(1 if i == axis else size for i, size in enumerate(data))
    return [data, rest, rest]


def instance_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    for index in (1, 2):
        fill(shapes, index, (data[1],))
    return [data, data[:2], data[:2]]


def group_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    for index in (1, 2):
        fill(shapes, index, (data[1],))
    groups = (data[0], node.number("num_groups", 1))
    return [data, groups, groups]


def l2_normalization(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    mode = node.attrs.get("mode", "instance")
    return [data, (data[0], *data[2:]) if mode == "channel" else data[:2] if mode == "spatial" else data[:1]]


def leaky_relu(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    if node.attrs.get("act_type") == "prelu":
        fill(shapes, 1, (data[1] if len(data) > 1 else data[0],))
    return [data]


def softmax_output(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    fill(shapes, 1, (data[0], prod(data[2:])) if node.flag("multi_output") else data[:-1])
    return [data]


def label_like_data(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    fill(shapes, 1, data)
    return [data]


def embedding(node: Node, shapes: Shapes) -> list[Shape]:
    rows, width = node.number("input_dim", 0), node.number("output_dim", 0)
    fill(shapes, 1, (rows, width))
    return [(*known(node, shapes), width)]


def up_sampling(node: Node, shapes: Shapes) -> list[Shape]:
    data, scale = known(node, shapes), node.number("scale", 1)
    if node.attrs.get("sample_type") == "bilinear":
        kernel = 2 * scale - scale % 2
        fill(shapes, 1, (data[1], 1, kernel, kernel))
        return [(*data[:2], *(size * scale for size in data[2:]))]
    image = tuple(size * scale for size in data[2:])
    inputs = [known(node, shapes, i) for i in range(len(shapes))]
    joins = node.attrs.get("multi_input_mode", "concat") == "concat"
    return [(data[0], sum(one[1] for one in inputs) if joins else data[1], *image)]


def resized(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    if len(shapes) > 1:
        return [(*data[:2], *known(node, shapes, 1)[2:])]
    # A scale where the attributes have one, otherwise a size.
    made = [
        int(size * float(node.attrs[f"scale_{name}"])) if node.attrs.get(f"scale_{name}", "None") != "None"
        else node.number(name, 1)
        for name, size in zip(("height", "width"), data[2:], strict=True)
    ]  # fmt: skip
    return [(*data[:2], *made)]


def roi_pooling(node: Node, shapes: Shapes) -> list[Shape]:
    data, regions = known(node, shapes, 0), known(node, shapes, 1)
    return [(regions[0], data[1], *node.numbers("pooled_size"))] * 2


def sequence(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shape of SequenceMask and SequenceReverse; the lengths are one a sample."""
    data = known(node, shapes)
    fill(shapes, 1, (data[1 - node.number("axis", 0)],))
    return [data]


def sequence_last(node: Node, shapes: Shapes) -> list[Shape]:
    (data,) = sequence(node, shapes)
    axis = node.number("axis", 0)
    return [(*data[:axis], *data[axis + 1 :])]


def attention_scores(node: Node, shapes: Shapes) -> list[Shape]:
    steps, batch, _ = known(node, shapes)
    return [(batch * node.number("heads", 1), steps, steps)]


def attention_values(node: Node, shapes: Shapes) -> list[Shape]:
    steps, batch, width = known(node, shapes)
    return [(steps, batch, width // 3)]


def ctc_loss(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    return [(data[1],), data]


def batch_of_output(_: Node, read: Shapes, made: Shapes) -> None:
    """Find the batch of what a layer reads by that of its output."""
    shape, whole = read[0], made[0] if made else None
    if shape is not None and shape[:1] == (0,) and whole is not None:
        read[0] = (whole[0], *shape[1:])
