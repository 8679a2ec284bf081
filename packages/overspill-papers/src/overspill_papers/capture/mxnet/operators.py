"""The operators of MXNet 1.5, as far as memory goes.

They have shapes (`shapes.py`, `layer_shapes.py`), the entries that their backward reads, in-place pairs, and temporary
space. They follow the registrations in MXNet's `src/operator/`, with cuDNN: `nn/`, `tensor/`, `rnn.cc`, `crop.cc`,
`leaky_relu.cc`, `softmax_output.cc`, `regression_output.cc` and others. All is float32, as MXNet's planner assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from overspill.core.errors import UnsupportedError

from . import layer_shapes as layers
from . import shapes
from .layer_shapes import GATES
from .shapes import Shape, Shapes
from .symbol import Node

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
    """The number of outputs of the gradient's node, one for each of the first inputs.

    With 0 the gradient is zero, and has no node.
    """
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
    reserve: Callable[[Node, Sequence[Shape]], int] = lambda *_: 0
    """Bytes that the operator allocates when it first runs, and keeps."""
    complete: Callable[[Node, Shapes, Shapes], None] = lambda *_: None
    """Fills in shapes of inputs that follow from those of the outputs."""


def _two_copies(inputs: Sequence[Shape]) -> int:
    """Return the bytes of normalised data and scaled gradients, each as large as the data (LayerNormGradCompute)."""
    return 2 * 4 * prod(inputs[0])


_KEPT = {"lstm": 2}
"""What cuDNN keeps of each unit of a recurrent layer besides the gates: the hidden state, and an LSTM's cell."""


def _recurrent_reserve(node: Node, inputs: Sequence[Shape]) -> int:
    """Return the bytes that cuDNN keeps for the backward of RNN, as for PyTorch (`capture/fake_cuda/recurrent.py`)."""
    steps, batch, _ = inputs[0]
    units = node.number("state_size", 0) * node.number("num_layers", 1) * (2 if node.flag("bidirectional") else 1)
    mode = node.attrs["mode"]
    return 4 * steps * batch * units * (GATES[mode] + _KEPT.get(mode, 1))


_BOTH: Pairs = ((0, 0), (1, 0))
_SUM = Operator(shapes.same, (), in_place=_BOTH)
_PRODUCT = Operator(shapes.same, ("g", "i0", "i1"), in_place=_BOTH, backward_in_place=((0, 1),))
_SCALAR = Operator(shapes.same, in_place=IN_PLACE, backward_in_place=IN_PLACE)
_OF_INPUT = Operator(shapes.same, ("g", "i0"), in_place=IN_PLACE, backward_in_place=_BOTH)
_OF_OUTPUT = Operator(shapes.same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=_BOTH)
_VIEW = Operator(shapes.reshape, in_place=IN_PLACE, backward_in_place=IN_PLACE, is_view=True)
_BROADCAST_PRODUCT = Operator(shapes.broadcast, ("g", "i0", "i1"), backward_in_place=((0, 1),))
_REDUCED = Operator(shapes.reduced)
_EXTREME = Operator(shapes.reduced, ("g", "i0", "o0"))
_CONVOLUTION = ("g", "i0", "i1")
_REGRESSION = Operator(layers.label_like_data, ("o0", "i1"), in_place=IN_PLACE, backward_in_place=IN_PLACE)
_SEQUENCE = Operator(layers.sequence, ("g", "i1"))

OPERATORS: dict[str, Operator] = {
    "Convolution": Operator(layers.convolution, _CONVOLUTION),
    "Deconvolution": Operator(layers.deconvolution, _CONVOLUTION),
    "Pooling": Operator(layers.pooling, ("g", "i0", "o0")),
    "FullyConnected": Operator(
        layers.fully_connected, ("g", "i0", "i1"), backward_in_place=((1, 0),), complete=layers.batch_of_output
    ),
    "RNN": Operator(
        layers.recurrent, ("i0", "i1", "i2", "o0", "g", "o1", "i3", "o2"), reserve=_recurrent_reserve
    ),
    "_rnn_param_concat": Operator(layers.parameter_concat, complete=layers.parts_of_parameters),
    "Activation": Operator(shapes.same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=IN_PLACE),
    "LeakyReLU": Operator(layers.leaky_relu, ("g", "i0", "i1", "o0"), backward_in_place=IN_PLACE),
    "BatchNorm": Operator(
        layers.batch_norm, ("g", "o1", "o2", "i0", "i1", "i2", "i3", "i4"), gradients=3, visible=1, auxiliary=(3, 4)
    ),
    "LayerNorm": Operator(
        layers.layer_norm, ("g", "i0", "i1", "o1", "o2"), in_place=IN_PLACE, visible=1, backward_space=_two_copies
    ),
    "InstanceNorm": Operator(layers.instance_norm, ("g", "i0", "i1", "o1", "o2"), visible=1),
    "GroupNorm": Operator(layers.group_norm, ("g", "i0", "i1", "o1", "o2"), in_place=IN_PLACE, visible=1),
    "L2Normalization": Operator(layers.l2_normalization, ("g", "o0", "o1"), visible=1),
    "LRN": Operator(lambda node, read: shapes.same(node, read) * 2, ("g", "i0", "o1"), visible=1),
    "Dropout": Operator(
        lambda node, read: shapes.same(node, read) * 2,
        ("g", "o1"),
        visible=1,
        in_place=IN_PLACE,
        backward_in_place=IN_PLACE,
    ),
    "softmax": Operator(shapes.same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=_BOTH),
    "log_softmax": Operator(shapes.same, ("g", "o0"), in_place=IN_PLACE, backward_in_place=_BOTH),
    # Losses. A gradient that comes from above is not read.
    "SoftmaxOutput": Operator(layers.softmax_output, ("o0", "i1"), in_place=IN_PLACE, backward_in_place=IN_PLACE),
    "LinearRegressionOutput": _REGRESSION,
    "LogisticRegressionOutput": _REGRESSION,
    "MAERegressionOutput": _REGRESSION,
    "SVMOutput": Operator(layers.softmax_output, ("i1", "o0")),
    "MakeLoss": Operator(shapes.same, ("i0",), in_place=IN_PLACE),
    "softmax_cross_entropy": Operator(shapes.one_number, ("g", "i0", "i1")),
    "CTCLoss": Operator(layers.ctc_loss, ("g", "o1"), gradients=1, visible=1),
    # Parts and shapes.
    "Concat": Operator(shapes.concat),
    "stack": Operator(shapes.stack),
    "SliceChannel": Operator(shapes.slice_channel),
    "slice": Operator(shapes.sliced),
    "slice_axis": Operator(shapes.slice_axis),
    "slice_like": Operator(shapes.slice_like),
    "Crop": Operator(shapes.crop),
    "Pad": Operator(shapes.padded),
    "Reshape": replace(_VIEW, complete=shapes.one_size),
    "Flatten": replace(_VIEW, infer=shapes.flatten),
    "expand_dims": replace(_VIEW, infer=shapes.expand_dims),
    "squeeze": replace(_VIEW, infer=shapes.squeeze),
    "reshape_like": replace(_VIEW, infer=shapes.like_second, gradients=1),
    "_copy": replace(_VIEW, infer=shapes.same),
    "transpose": Operator(shapes.transpose),
    "SwapAxis": Operator(shapes.swap_axes),
    "broadcast_to": Operator(shapes.broadcast_to),
    "broadcast_axis": Operator(shapes.broadcast_axis),
    "broadcast_like": Operator(shapes.like_second, gradients=1),
    "tile": Operator(shapes.tile),
    "repeat": Operator(shapes.repeat),
    "reverse": Operator(shapes.same),
    "depth_to_space": Operator(shapes.depth_to_space),
    "space_to_depth": Operator(shapes.space_to_depth),
    "UpSampling": Operator(layers.up_sampling),
    "_contrib_BilinearResize2D": Operator(layers.resized),
    "_contrib_AdaptiveAvgPooling2D": Operator(layers.adaptive_pooling),
    "ROIPooling": Operator(layers.roi_pooling, ("g", "i1", "o1"), visible=1),
    "SequenceMask": _SEQUENCE,
    "SequenceReverse": _SEQUENCE,
    "SequenceLast": Operator(layers.sequence_last, ("g", "i1")),
    # By indices.
    "Embedding": Operator(layers.embedding, ("g", "i0")),
    "take": Operator(shapes.take, ("g", "i1")),
    "_scatter_set_nd": Operator(lambda node, read: [shapes.known(node, read)], ("g", "i1")),
    "pick": Operator(shapes.picked, ("g", "i1"), gradients=1),
    "gather_nd": Operator(shapes.gather_nd, ("g", "i1"), gradients=1),
    "where": Operator(shapes.broadcast, ("g", "i0")),
    # Products.
    "batch_dot": Operator(shapes.batch_dot, ("g", "i0", "i1")),
    "dot": Operator(shapes.dot, ("g", "i0", "i1")),
    "_contrib_interleaved_matmul_selfatt_qk": Operator(layers.attention_scores, ("g", "i0")),
    "_contrib_interleaved_matmul_selfatt_valatt": Operator(layers.attention_values, ("g", "i0", "i1")),
    # Element by element.
    "elemwise_add": _SUM,
    "elemwise_sub": Operator(shapes.same, in_place=_BOTH, backward_in_place=((0, 0), (0, 1))),
    "elemwise_mul": _PRODUCT,
    "elemwise_div": _PRODUCT,
    "ElementWiseSum": Operator(shapes.same, (), in_place=IN_PLACE),
    "broadcast_add": Operator(shapes.broadcast, backward_in_place=((0, 0), (0, 1))),
    "broadcast_sub": Operator(shapes.broadcast, backward_in_place=((0, 0), (0, 1))),
    "_contrib_div_sqrt_dim": _SCALAR,
    **dict.fromkeys(("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar"), _SCALAR),
    **dict.fromkeys(("negative", "Cast"), _SCALAR),
    **dict.fromkeys(("broadcast_mul", "broadcast_div", "broadcast_power"), _BROADCAST_PRODUCT),
    **dict.fromkeys(("broadcast_maximum", "broadcast_minimum"), _BROADCAST_PRODUCT),
    **dict.fromkeys(("sigmoid", "tanh", "relu", "exp", "sqrt", "cbrt", "_rpower_scalar"), _OF_OUTPUT),
    **dict.fromkeys(("erf", "abs", "square", "log", "log1p", "expm1", "rsqrt", "reciprocal", "sin", "cos"), _OF_INPUT),
    **dict.fromkeys(("clip", "hard_sigmoid", "softsign", "smooth_l1", "_power_scalar", "_rdiv_scalar"), _OF_INPUT),
    **dict.fromkeys(("_maximum_scalar", "_minimum_scalar", "_mod_scalar"), _OF_INPUT),
    "SoftmaxActivation": _OF_OUTPUT,
    # Reductions.
    **dict.fromkeys(("mean", "sum"), _REDUCED),
    **dict.fromkeys(("max", "min", "prod", "norm"), _EXTREME),
    # Sums of gradients, which backward adds.
    "_grad_add": Operator(shapes.same, in_place=_BOTH),
    # Without a gradient.
    **dict.fromkeys(("_zeros", "_ones", "_full", "_arange"), Operator(shapes.made_of_nothing, gradients=0)),
    **dict.fromkeys(("zeros_like", "ones_like", "sign", "floor", "round"), Operator(shapes.same, gradients=0)),
    **dict.fromkeys(("argmax", "argmin"), Operator(shapes.argument, gradients=0)),
    **dict.fromkeys(("shape_array", "size_array"), Operator(shapes.shape_array, gradients=0)),
    "BlockGrad": replace(_VIEW, infer=shapes.same, gradients=0),
    "topk": Operator(shapes.top, gradients=0),
    "one_hot": Operator(shapes.one_hot, gradients=0),
    **{
        f"{kind}_{name}": Operator(shapes.broadcast, gradients=0)
        for kind in ("broadcast", "") for name in ("equal", "not_equal", "greater", "greater_equal", "lesser",
        "lesser_equal", "logical_and", "logical_or", "logical_xor", "mod")
    },
    **{
        f"_{name}_scalar": Operator(shapes.same, gradients=0)
        for name in ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal")
    },
}  # fmt: skip
_ALIASES = {
    "_plus": "elemwise_add", "_Plus": "elemwise_add", "_add": "elemwise_add", "_mul": "elemwise_mul",
    "_Mul": "elemwise_mul", "add_n": "ElementWiseSum", "identity": "_copy", "reshape": "Reshape", "flatten": "Flatten",
    "concat": "Concat", "split": "SliceChannel", "Softmax": "SoftmaxOutput", "_PlusScalar": "_plus_scalar",
    "_MulScalar": "_mul_scalar", "_DivScalar": "_div_scalar", "make_loss": "MakeLoss", "_minus": "elemwise_sub",
    "_sub": "elemwise_sub", "_Minus": "elemwise_sub", "_div": "elemwise_div", "_Div": "elemwise_div",
    "_MinusScalar": "_minus_scalar", "_RMinusScalar": "_rminus_scalar", "_RDivScalar": "_rdiv_scalar",
    "_PowerScalar": "_power_scalar", "swapaxes": "SwapAxis", "pad": "Pad", "cast": "Cast", "crop": "slice",
    "stop_gradient": "BlockGrad", "broadcast_plus": "broadcast_add", "broadcast_minus": "broadcast_sub",
    "broadcast_axes": "broadcast_axis", "sum_axis": "sum", "max_axis": "max", "min_axis": "min", "flip": "reverse",
    "choose_element_0index": "pick", "BatchNorm_v1": "BatchNorm", "Convolution_v1": "Convolution",
    "Pooling_v1": "Pooling", "SyncBatchNorm": "BatchNorm", "_contrib_SyncBatchNorm": "BatchNorm",
    "_contrib_CTCLoss": "CTCLoss", "ctc_loss": "CTCLoss", "_linalg_gemm2": "batch_dot", "linalg_gemm2": "batch_dot",
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


def is_operator(node: Node, *names: str) -> bool:
    """Return whether `node` is of an operator of `names`, by any alias."""
    return _ALIASES.get(node.op, node.op) in names
