"""TensorFlow's GPU kernels, as far as memory goes: aliases of inputs, buffers to overwrite, and temporaries.

From `tensorflow/core/kernels/` of releases 1.5 to 2: `cwise_ops_common.h`, `relu_op.h`, `bias_op.cc`, `softmax_op.cc`,
`xent_op.cc`, `aggregate_ops.cc`, `fused_batch_norm_op.cc` (forward_input_or_allocate_output), `conv_ops.cc`,
`conv_grad_input_ops.cc` and `conv_grad_filter_ops.cc` (allocate_temp, CudnnScratchAllocator).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from overspill.costs import Sizes

from .graph import SHAPES, GraphOp, Made, StepGraph

ALIASES = frozenset({
    "Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "ReadVariableOp",
    "CheckNumerics", "EnsureShape", "Snapshot", "PlaceholderWithDefault", "RefIdentity", "_EagerConst", "DebugIdentity",
})  # fmt: skip
"""Ops whose output has the memory of their first input."""
VARIABLES = frozenset({"VariableV2", "VarHandleOp", "Variable"})
INPUTS = frozenset({"Placeholder", "_Arg"})
NOTHING = frozenset({"NoOp", "Assert", "_Retval", "BroadcastGradientArgs", *SHAPES})
"""Ops that make nothing on the device, whatever their outputs are."""
UPDATES = (
    "ApplyGradientDescent", "ApplyMomentum", "ApplyAdam", "ApplyRMSProp", "ApplyAdagrad", "ApplyKerasMomentum",
    "Assign",
)  # fmt: skip
"""Beginnings of the names of ops that update a variable where it is, with `Resource` before them or not."""
_UNARY = frozenset({
    "Relu", "Relu6", "Elu", "Selu", "Neg", "Exp", "Log", "Sqrt", "Rsqrt", "Square", "Tanh", "Sigmoid", "Abs",
    "Reciprocal",
    "Inv", "Erf", "Floor", "Round", "Sign", "Softplus", "LeakyRelu", "BiasAdd", "BiasAddV1", "Softmax", "LogSoftmax",
    "ClipByValue", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "ZerosLike", "OnesLike", "Cast",
})  # fmt: skip
_BINARY = frozenset({
    "Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "Maximum", "Minimum", "SquaredDifference", "Pow", "DivNoNan",
    "ReluGrad",
    "TanhGrad", "SigmoidGrad", "RsqrtGrad", "SqrtGrad", "InvGrad", "EluGrad", "SoftplusGrad", "Relu6Grad",
    "LeakyReluGrad",
    "Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "LogicalAnd",
})  # fmt: skip
_FIRST_TO_SECOND = frozenset({"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
CONVOLUTIONS = frozenset({"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"})


def forwards(op: GraphOp) -> Iterator[tuple[int, int]]:
    """Yield pairs of an input and an output that may overwrite it, in the order of trial.

    It may do so if it holds the only reference.
    """
    if op.type in _UNARY:
        yield 0, 0
    elif op.type in _BINARY:
        yield from ((0, 0), (1, 0))
    elif op.type in _FIRST_TO_SECOND:
        yield 0, 1
    elif op.type in {"AddN", "AccumulateNV2"}:
        yield from ((index, 0) for index in range(len(op.inputs)))
    elif op.type in {"Select", "SelectV2"}:
        yield from ((1, 0), (2, 0))


def is_update(op: GraphOp) -> bool:
    """Return whether `op` updates a variable in place."""
    return op.type.removeprefix("Resource").startswith(UPDATES)


def is_large(made: Made) -> bool:
    """Return whether an output is on the device.

    Shapes and indices, which are integers, are on the host.
    """
    return made.nbytes > 0 and not made.dtype.startswith(("int", "uint"))


def convolution(graph: StepGraph, op: GraphOp) -> Sizes | None:
    """Return the sizes of a convolution op as cuDNN receives them, or None for a plain matrix product."""
    found = {"Conv2D": (0, 1, None), "Conv2DBackpropInput": (None, 1, 2), "Conv2DBackpropFilter": (0, None, 2)}[op.type]
    made = op.makes[0]
    x, w, y = (made if index is None else _read(graph, op, index) for index in found)
    rows, columns, c, k = w.shape
    channels_last = op.attrs.get("data_format", "NHWC") == "NHWC"
    (height, width), (p, q) = ((s.shape[1:3] if channels_last else s.shape[2:4]) for s in (x, y))
    if channels_last and (rows, columns, height, width) == (1, 1, p, q):
        return None  # cuBLAS
    groups = (x.shape[3] if channels_last else x.shape[1]) // c
    return Sizes(x.shape[0], c * groups, k, (height, width), (p, q), (rows, columns), groups, 4, 1)


def temporaries(op: GraphOp, sizes: Sizes) -> tuple[list[int], bool]:
    """Return temporary bytes of a convolution's kernel besides its output, and whether the last becomes the output.

    The temporaries are the filter in cuDNN's order, the result in it, and in NHWC the maps that are also read.
    """
    x, y, w = sizes.map_bytes
    channels_last = op.attrs.get("data_format", "NHWC") == "NHWC"
    read = {"Conv2D": [x], "Conv2DBackpropInput": [y], "Conv2DBackpropFilter": [y, x]}[op.type]
    made = {"Conv2D": y, "Conv2DBackpropInput": x, "Conv2DBackpropFilter": w}[op.type]
    padded = [x + x // prod(sizes.image) * sum(sizes.image)] if _pads_one_side(op, sizes) else []
    temporary = [*padded, *(read if channels_last else [])]
    if op.type == "Conv2DBackpropFilter":
        return [*temporary, made], False
    return [*temporary, w, made], not channels_last


def _pads_one_side(op: GraphOp, sizes: Sizes) -> bool:
    """Return whether SAME padding is odd, so that the input is copied into a larger map first."""
    if op.attrs.get("padding") != "SAME":
        return False
    return any(
        max(0, (made - 1) * sizes.stride + taps - size) % 2
        for size, made, taps in zip(sizes.image, sizes.output, sizes.kernel, strict=True)
    )


def _read(graph: StepGraph, op: GraphOp, index: int) -> Made:
    source = op.inputs[index]
    return graph.ops[source.op].makes[source.number]
