"""The operators of MXNet 1.5, as far as memory goes.

They have shapes, the entries that their backward reads, in-place pairs, and temporary space. They follow the
registrations in MXNet's `src/operator/`, with cuDNN: `nn/convolution.cc`, `nn/batch_norm.cc`, `nn/activation.cc`,
`nn/pooling.cc`, `nn/fully_connected.cc`, `nn/dropout.cc`, `nn/lrn.cc`, `nn/layer_norm-inl.h`, `nn/softmax.cc`,
`softmax_output.cc`, `leaky_relu.cc`, `tensor/` and others. All is float32, as MXNet's planner assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from overspill.core.errors import UnsupportedError

from .symbol import Node

Shape = tuple[int, ...]
Shapes = list[Shape | None]
Pairs = tuple[tuple[int, int], ...]

IN_PLACE: Pairs = ((0, 0),)


@dataclass(frozen=True)
class Operator:
    """One operator."""

    infer: Callable[[Node, Shapes], list[Shape]]
    """Fills in the shapes of inputs that it can infer (weights), and returns those of the outputs."""
    backward: tuple[str, ...] = ("g",)
    """The entries that the gradient's node reads, in order.

    They are `g` gradients of visible outputs, `i0` an input, `o1` an output. It is empty without such a node, where
    every input's gradient is that of the output.
    """
    gradients: int | None = None
    """The number of outputs of the gradient's node, one for each of the first inputs."""
    in_place: Pairs = ()
    """Pairs of input and output that may share memory."""
    backward_in_place: Pairs = ()
    """Pairs of input and output of the gradient's node that may share memory."""
    is_view: bool = False
    """Whether the output always shares the input's memory."""
    visible: int | None = None
    auxiliary: tuple[int, ...] = ()
    """Inputs that are states."""
    backward_space: Callable[[Sequence[Shape]], int] = lambda _: 0
    """Temporary space of backward, in bytes."""


def known(node: Node, shapes: Shapes, index: int = 0) -> Shape:
    """Return the shape of one input, which must be known by now."""
    shape = shapes[index] if index < len(shapes) else None
    if shape is None:
        raise UnsupportedError(
            f"the shape of input {index} of {node.name} ({node.op}) is not known; give it with --input"
        )
    return shape


def _fill(shapes: Shapes, index: int, shape: Shape) -> None:
    if index < len(shapes) and shapes[index] is None:
        shapes[index] = shape


def _same(node: Node, shapes: Shapes) -> list[Shape]:
    first = next((shape for shape in shapes if shape is not None), None)
    if first is None:
        return [known(node, shapes)]
    for index in range(len(shapes)):
        _fill(shapes, index, first)
    return [first]


def _convolution(node: Node, shapes: Shapes) -> list[Shape]:
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
    _fill(shapes, 1, (filters, data[1] // node.number("num_group", 1), *kernel))
    _fill(shapes, 2, (filters,))
    image = tuple(
        (size + 2 * p - (d * (k - 1) + 1)) // s + 1
        for size, p, d, k, s in zip(data[2:], pad, dilate, kernel, stride, strict=True)
    )
    return [(data[0], filters, *image)]


def _pooling(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    if node.flag("global_pool"):
        return [(*data[:2], *(1 for _ in data[2:]))]
    kernel = node.numbers("kernel")
    stride, pad = node.numbers("stride", (1,) * len(kernel)), node.numbers("pad", (0,) * len(kernel))
    full = node.attrs.get("pooling_convention", "valid") == "full"
    image = tuple(
        (size + 2 * p - k + (s - 1 if full else 0)) // s + 1
        for size, p, k, s in zip(data[2:], pad, kernel, stride, strict=True)
    )
    return [(*data[:2], *image)]


def _fully_connected(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    hidden = node.number("num_hidden", 0)
    flat = node.flag("flatten", default=True)
    _fill(shapes, 1, (hidden, prod(data[1:]) if flat else data[-1]))
    _fill(shapes, 2, (hidden,))
    return [(data[0], hidden) if flat else (*data[:-1], hidden)]


def _batch_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    channels = (data[node.number("axis", 1)],)
    for index in range(1, 5):
        _fill(shapes, index, channels)
    return [data, channels, channels]


def _layer_norm(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axis = node.number("axis", -1) % len(data)
    for index in (1, 2):
        _fill(shapes, index, (data[axis],))
    rest = tuple(1 if i == axis else size for i, size in enumerate(data))
    return [data, rest, rest]


def _softmax_output(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    _fill(shapes, 1, (data[0], *data[2:]) if node.flag("multi_output") else data[:-1])
    return [data]


def _concat(node: Node, shapes: Shapes) -> list[Shape]:
    first = known(node, shapes)
    axis = node.number("dim", 1) % len(first)
    total = sum(known(node, shapes, i)[axis] for i in range(len(shapes)))
    return [(*first[:axis], total, *first[axis + 1 :])]


def _slice_channel(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    count, axis = node.number("num_outputs", 1), node.number("axis", 1) % len(data)
    part = (*data[:axis], data[axis] // count, *data[axis + 1 :])
    if node.flag("squeeze_axis"):
        part = (*data[:axis], *data[axis + 1 :])
    return [part] * count


def _reshape(node: Node, shapes: Shapes) -> list[Shape]:
    """Return the shape of MXNet's Reshape.

    0 keeps a dimension, -1 takes the remaining elements, -2 copies the rest, -3 joins two, -4 splits one by the next
    two.
    """
    data = known(node, shapes)
    wanted, made, at = list(node.numbers("shape")), [], 0
    while wanted:
        size = wanted.pop(0)
        if size == -4:
            one, other = wanted.pop(0), wanted.pop(0)
            made += [data[at] // other if one == -1 else one, data[at] // one if other == -1 else other]
        elif size == -2:
            made += data[at:]
            at = len(data)
            continue
        else:
            made.append(data[at] if size == 0 else data[at] * data[at + 1] if size == -3 else size)
            at += size == -3
        at += 1
    # What is left goes to the dimension -1.
    left = prod(data) // max(1, prod(size for size in made if size != -1))
    return [tuple(left if size == -1 else size for size in made)]


def _transpose(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    return [tuple(data[axis] for axis in node.numbers("axes", tuple(reversed(range(len(data))))))]


def _flatten(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    return [(data[0], prod(data[1:]))]


def _expand_dims(node: Node, shapes: Shapes) -> list[Shape]:
    data, axis = known(node, shapes), node.number("axis", 0)
    axis %= len(data) + 1
    return [(*data[:axis], 1, *data[axis:])]


def _slice_axis(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axis = node.number("axis", 0) % len(data)
    begin, end = node.number("begin", 0), node.attrs.get("end", "None")
    stop = data[axis] if end == "None" else int(end) % (data[axis] + 1)
    return [(*data[:axis], stop - begin % data[axis], *data[axis + 1 :])]


def _embedding(node: Node, shapes: Shapes) -> list[Shape]:
    rows, width = node.number("input_dim", 0), node.number("output_dim", 0)
    _fill(shapes, 1, (rows, width))
    return [(*known(node, shapes), width)]


def _batch_dot(node: Node, shapes: Shapes) -> list[Shape]:
    left, right = known(node, shapes, 0), known(node, shapes, 1)
    rows = left[-1] if node.flag("transpose_a") else left[-2]
    columns = right[-2] if node.flag("transpose_b") else right[-1]
    return [(*left[:-2], rows, columns)]


def _broadcast(node: Node, shapes: Shapes) -> list[Shape]:
    left, right = known(node, shapes, 0), known(node, shapes, 1)
    rank = max(len(left), len(right))
    left, right = (1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right
    return [tuple(map(max, left, right))]


def _reduced(node: Node, shapes: Shapes) -> list[Shape]:
    data = known(node, shapes)
    axes = {axis % len(data) for axis in node.numbers("axis", tuple(range(len(data))))}
    if node.flag("keepdims"):
        return [tuple(1 if i in axes else size for i, size in enumerate(data))]
    return [tuple(size for i, size in enumerate(data) if i not in axes) or (1,)]


def _two_copies(inputs: Sequence[Shape]) -> int:
    """Return the bytes of normalised data and scaled gradients, each as large as the data (LayerNormGradCompute)."""
    return 2 * 4 * prod(inputs[0])


_SUM = Operator(_same, (), in_place=((0, 0), (1, 0)))
_PRODUCT = Operator(_same, ("g", "i0", "i1"), in_place=((0, 0), (1, 0)), backward_in_place=((0, 1),))
_VIEW_BACK: Pairs = ((0, 0),)
_SCALAR = Operator(_same, in_place=IN_PLACE, backward_in_place=IN_PLACE)

OPERATORS: dict[str, Operator] = {
    "Convolution": Operator(_convolution, ("g", "i0", "i1")),
    "Pooling": Operator(_pooling, ("g", "i0", "o0")),
    "FullyConnected": Operator(_fully_connected, ("g", "i0", "i1"), backward_in_place=((1, 0),)),
    "Activation": Operator(_same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=IN_PLACE),
    "LeakyReLU": Operator(_same, ("g", "i0", "o0"), backward_in_place=IN_PLACE),
    "BatchNorm": Operator(
        _batch_norm, ("g", "o1", "o2", "i0", "i1", "i2", "i3", "i4"), gradients=3, visible=1, auxiliary=(3, 4)
    ),
    "LayerNorm": Operator(
        _layer_norm, ("g", "i0", "i1", "o1", "o2"), in_place=IN_PLACE, visible=1, backward_space=_two_copies
    ),
    "LRN": Operator(lambda node, shapes: _same(node, shapes) * 2, ("g", "i0", "o1"), visible=1),
    "Dropout": Operator(
        lambda node, shapes: _same(node, shapes) * 2,
        ("g", "o1"),
        visible=1,
        in_place=IN_PLACE,
        backward_in_place=IN_PLACE,
    ),
    "SoftmaxOutput": Operator(_softmax_output, ("o0", "i1"), in_place=IN_PLACE, backward_in_place=IN_PLACE),
    "softmax": Operator(_same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=((0, 0), (1, 0))),
    "log_softmax": Operator(_same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=((0, 0), (1, 0))),
    "Concat": Operator(_concat),
    "SliceChannel": Operator(_slice_channel),
    "elemwise_add": _SUM,
    "elemwise_mul": _PRODUCT,
    "broadcast_add": Operator(_broadcast, backward_in_place=((0, 0), (0, 1))),
    "broadcast_mul": Operator(_broadcast, ("g", "i0", "i1"), backward_in_place=((0, 1),)),
    "_plus_scalar": _SCALAR,
    "_mul_scalar": _SCALAR,
    "_div_scalar": _SCALAR,
    "_contrib_div_sqrt_dim": _SCALAR,
    "erf": Operator(_same, ("g", "i0"), in_place=IN_PLACE, backward_in_place=((0, 0), (1, 0))),
    "where": Operator(lambda node, shapes: [known(node, shapes, 1)], ("g", "i0")),
    "ElementWiseSum": Operator(_same, (), in_place=IN_PLACE),
    "_copy": Operator(_same, in_place=IN_PLACE, backward_in_place=IN_PLACE, is_view=True),
    "Reshape": Operator(_reshape, in_place=IN_PLACE, backward_in_place=_VIEW_BACK, is_view=True),
    "Flatten": Operator(_flatten, in_place=IN_PLACE, backward_in_place=_VIEW_BACK, is_view=True),
    "expand_dims": Operator(_expand_dims, in_place=IN_PLACE, backward_in_place=_VIEW_BACK, is_view=True),
    "transpose": Operator(_transpose),
    "slice_axis": Operator(_slice_axis),
    "Embedding": Operator(_embedding, ("g", "i0")),
    "batch_dot": Operator(_batch_dot, ("g", "i0", "i1")),
    "mean": Operator(_reduced),
    "sum": Operator(_reduced),
    # Sums of gradients, which backward adds.
    "_grad_add": Operator(_same, in_place=((0, 0), (1, 0))),
    # The loss: its gradient is a number and needs none from above.
    "MakeLoss": Operator(_same, ("i0",), in_place=IN_PLACE),
}
_ALIASES = {
    "_plus": "elemwise_add", "_Plus": "elemwise_add", "_add": "elemwise_add", "_mul": "elemwise_mul",
    "_Mul": "elemwise_mul", "add_n": "ElementWiseSum", "identity": "_copy", "reshape": "Reshape", "flatten": "Flatten",
    "concat": "Concat", "split": "SliceChannel", "Softmax": "SoftmaxOutput", "_PlusScalar": "_plus_scalar",
    "_MulScalar": "_mul_scalar", "_DivScalar": "_div_scalar", "make_loss": "MakeLoss",
}  # fmt: skip


def operator_of(node: Node) -> Operator:
    """Return the operator of `node`. Raises UnsupportedError for an unknown one."""
    name = _ALIASES.get(node.op, node.op)
    if name not in OPERATORS:
        raise UnsupportedError(
            f"{node.name} is an operator {node.op} of MXNet, which is not known here; known: "
            f"{', '.join(sorted(OPERATORS))}"
        )
    return OPERATORS[name]


def is_operator(node: Node, name: str) -> bool:
    """Return whether `node` is of the operator `name`, by any alias."""
    return _ALIASES.get(node.op, node.op) == name
