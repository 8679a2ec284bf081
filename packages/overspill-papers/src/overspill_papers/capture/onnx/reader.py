"""Read an ONNX model as the symbol that MXNet's own importer makes of it.

An ONNX file describes how to run a network, not how to train it. Here it is trained as MXNet trains the symbol. Weights
are the initialisers of floating point and other constants that ops read. The loss is a softmax's cross entropy on an
output of two dimensions, and the mean of any other. All is float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from overspill.core.errors import RequestError, UnsupportedError
from overspill_papers.capture.mxnet.shapes import Shape
from overspill_papers.capture.mxnet.symbol import VARIABLE, Node, NodeOutput, Symbol

LABEL = "softmax_label"
# ONNX's operator: MXNet's, and its attributes.
_PLAIN: dict[str, tuple[str, dict[str, str]]] = {
    "Relu": ("Activation", {"act_type": "relu"}), "Sigmoid": ("Activation", {"act_type": "sigmoid"}),
    "Tanh": ("Activation", {"act_type": "tanh"}), "Softplus": ("Activation", {"act_type": "softrelu"}),
    "LeakyRelu": ("LeakyReLU", {}), "Elu": ("LeakyReLU", {"act_type": "elu"}),
    "Gelu": ("LeakyReLU", {"act_type": "gelu"}),
    "Clip": ("LeakyReLU", {}), "HardSigmoid": ("LeakyReLU", {}), "Erf": ("erf", {}), "Sqrt": ("erf", {}),
    "Pow": ("erf", {}),
    "Softmax": ("softmax", {}), "LogSoftmax": ("log_softmax", {}), "Add": ("broadcast_add", {}),
    "Sub": ("broadcast_add", {}),
    "Mul": ("broadcast_mul", {}), "Div": ("broadcast_mul", {}), "Dropout": ("Dropout", {}), "Identity": ("_copy", {}),
    "Cast": ("_copy", {}), "Sum": ("ElementWiseSum", {}), "LRN": ("LRN", {}),
}  # fmt: skip
_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_FIRST_ONLY = frozenset({"Clip", "Dropout", "Pow", *_RESHAPES})
"""Operators whose further inputs are settings."""
_CONSTANTS = frozenset({"Constant", "Shape", "Size"})
"""Operators whose outputs are known before the network runs, whatever they read."""


def read(path: Path, batch: int, shapes: Mapping[str, Shape], *, trains: bool) -> tuple[Symbol, dict[str, Shape]]:
    """Return the symbol of the ONNX model at `path`, with input shapes.

    They are the given ones, otherwise those of the file. A size without a number in the file is the batch. Raises
    RequestError for an invalid model, and for inputs that do not exist; UnsupportedError for unknown operators.
    """
    try:
        onnx: Any = importlib.import_module("onnx")
    except ImportError as error:
        raise RequestError("--onnx needs the onnx package: pip install overspill[onnx]") from error
    if not path.is_file():
        raise RequestError(f"cannot read {path}: there is no such file; name one that is there")
    try:
        model = onnx.load(str(path), load_external_data=False)
        inputs = _fix_inputs(model.graph, batch, shapes)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except RequestError:
        raise
    except Exception as error:  # protobuf's errors and onnx's have no base of their own
        raise RequestError(f"{path} is not a model of ONNX: {' '.join(str(error).split())[:300]}") from error
    return _Reader(model.graph, onnx).symbol(trains=trains), inputs


def _fix_inputs(graph: Any, batch: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Write the shapes of all inputs into `graph`, and return them."""
    weights = {initializer.name for initializer in graph.initializer}
    found: dict[str, Shape] = {}
    for value in graph.input:
        if value.name in weights:
            continue
        # A given shape, or the file's with the batch for its one unknown size.
        dims = value.type.tensor_type.shape.dim
        names = {dim.dim_param for dim in dims if not dim.HasField("dim_value")}
        if value.name in shapes:
            found[value.name] = shapes[value.name]
        elif len(names) > 1 or not dims:
            raise RequestError(
                f"the file does not say the shape of {value.name}; give it with --input {value.name}=N,…"
            )
        else:
            found[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else batch for dim in dims)
        # Write the shape into the graph.
        value.type.tensor_type.shape.ClearField("dim")
        for size in found[value.name]:
            value.type.tensor_type.shape.dim.add().dim_value = size
    for name in shapes:
        if name not in found:
            raise RequestError(f"the model has no input {name!r}; its inputs: {', '.join(found)}")
    return found


class _Reader:
    """Adds nodes in the file's order, which is that of the data."""

    def __init__(self, graph: Any, onnx: Any) -> None:
        self.graph, self.onnx = graph, onnx
        self.nodes: list[Node] = []
        self.place: dict[str, NodeOutput] = {}
        values = [*graph.value_info, *graph.input, *graph.output]
        self.shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in values}
        self.shapes |= {initializer.name: tuple(initializer.dims) for initializer in graph.initializer}
        kinds = {i.name: onnx.helper.tensor_dtype_to_np_dtype(i.data_type).kind for i in graph.initializer}
        self.weights, self.constants = set(kinds), {name for name, kind in kinds.items() if kind in "iub"}

    def symbol(self, *, trains: bool) -> Symbol:
        """Return the network, with a loss at its end if it is trained."""
        for value in self.graph.input:
            if value.name not in self.weights:
                self.place[value.name] = self._add(Node(VARIABLE, value.name))
        for number, node in enumerate(self.graph.node):
            if self._folds(node):
                continue
            self._node(node, node.name or f"{node.op_type.lower()}{number}")
        # The outputs, then a loss on the first.
        heads = tuple(self.place[value.name] for value in self.graph.output if value.name in self.place)
        if not heads:
            raise UnsupportedError("the model has no output that is computed")
        if not trains:
            return Symbol(tuple(self.nodes), heads)
        first = self.graph.output[0].name
        if len(self.shapes.get(first, ())) == 2:
            label = self._add(Node(VARIABLE, LABEL))
            loss = self._add(Node("SoftmaxOutput", "softmax", (heads[0], label)))
        else:
            loss = self._add(Node("MakeLoss", "loss", (self._add(Node("mean", "mean", (heads[0],))),)))
        return Symbol(tuple(self.nodes), (loss,))

    def _folds(self, node: Any) -> bool:
        """Return whether `node` makes constants, which follow from shapes and constants alone and need no op."""
        follows = bool(node.input) and self.constants.issuperset(filter(None, node.input))
        if node.op_type not in _CONSTANTS and not follows:
            return False
        self.weights.update(node.output)  # for ops that read them
        # What has a shape and one value stands for a weight that was left out of the file: ops on it are the network's.
        if node.op_type != "ConstantOfShape":
            self.constants.update(node.output)
        return True

    def _node(self, node: Any, name: str) -> None:
        attrs = {attribute.name: self.onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        read = [each for each in node.input if each]
        made = _BUILDERS[node.op_type](self, node, name, read, attrs) if node.op_type in _BUILDERS else None
        if made is None:
            made = self._plain(node, name, read)
        for index, output in enumerate(node.output):
            self.place[output] = NodeOutput(made.node, index)

    def _plain(self, node: Any, name: str, read: list[str]) -> NodeOutput:
        if node.op_type in _RESHAPES:
            return self._op("Reshape", name, read[:1], {"shape": str(self._shape(node.output[0]))})
        if node.op_type not in _PLAIN:
            raise UnsupportedError(
                f"{name} is an operator {node.op_type} of ONNX, which is not known here; known: "
                f"{', '.join(sorted({*_PLAIN, *_RESHAPES, *_BUILDERS}))}"
            )
        op, attrs = _PLAIN[node.op_type]
        return self._op(op, name, read[:1] if node.op_type in _FIRST_ONLY else read, attrs)

    def _op(self, op: str, name: str, read: list[str], attrs: Mapping[str, object]) -> NodeOutput:
        entries = tuple(self._entry(each) for each in read)
        return self._add(Node(op, name, entries, {key: str(value) for key, value in attrs.items()}))

    def _entry(self, name: str) -> NodeOutput:
        """Return the entry of a value. A weight becomes a variable when it is first read."""
        if name not in self.place:
            if name not in self.weights or name not in self.shapes:
                raise UnsupportedError(f"the shape of {name} cannot be told; simplify the model first")
            shape = str(self.shapes[name] or (1,))
            self.place[name] = self._add(Node(VARIABLE, name, (), {"__shape__": shape}))
        return self.place[name]

    def _shape(self, name: str) -> Shape:
        shape = self.shapes.get(name)
        if shape is None or 0 in shape:
            raise UnsupportedError(f"the shape of {name} cannot be told; simplify the model first")
        return shape

    def _add(self, node: Node) -> NodeOutput:
        self.nodes.append(node)
        return NodeOutput(len(self.nodes) - 1, 0)

    def _convolution(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        weight = self._shape(read[1])
        kernel = weight[2:]
        pads = attrs.get("pads", [0] * 2 * len(kernel))
        return self._op("Convolution", name, read, {
            "num_filter": weight[0], "kernel": kernel, "stride": tuple(attrs.get("strides", (1,) * len(kernel))),
            "dilate": tuple(attrs.get("dilations", (1,) * len(kernel))), "pad": tuple(pads[: len(kernel)]),
            "num_group": attrs.get("group", 1), "no_bias": len(read) < 3,
        })  # fmt: skip

    def _pooling(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        kind = "max" if "Max" in node.op_type else "avg"
        if node.op_type.startswith("Global"):
            return self._op("Pooling", name, read, {"pool_type": kind, "global_pool": True})
        kernel = tuple(attrs["kernel_shape"])
        pads = attrs.get("pads", [0] * 2 * len(kernel))
        return self._op("Pooling", name, read, {
            "pool_type": kind, "kernel": kernel, "stride": tuple(attrs.get("strides", (1,) * len(kernel))),
            "pad": tuple(pads[: len(kernel)]), "pooling_convention": "full" if attrs.get("ceil_mode") else "valid",
        })  # fmt: skip

    def _gemm(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        weight = self._shape(read[1])
        hidden = weight[0] if attrs.get("transB") else weight[1]
        return self._op("FullyConnected", name, read, {"num_hidden": hidden, "no_bias": len(read) < 3})

    def _matmul(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        if read[1] in self.weights and len(self._shape(read[1])) == 2:
            hidden = self._shape(read[1])[1]
            return self._op("FullyConnected", name, read, {"num_hidden": hidden, "no_bias": True, "flatten": False})
        return self._op("batch_dot", name, read, {})

    def _batch_norm(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        return self._op("BatchNorm", name, read, {"fix_gamma": False})

    def _layer_norm(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("LayerNorm", name, read, {"axis": attrs.get("axis", -1)})

    def _concat(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("Concat", name, read, {"dim": attrs["axis"], "num_args": len(read)})

    def _transpose(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("transpose", name, read, {"axes": tuple(attrs["perm"])} if "perm" in attrs else {})

    def _mean(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        source, made = self._shape(read[0]), self._shape(node.output[0])
        keeps = bool(attrs.get("keepdims", 1))
        axes = attrs.get("axes")
        if axes is None:  # an input in later versions
            axes = [i for i, size in enumerate(source) if keeps and made[i] != size]
            axes = axes or list(range(len(source) - 1, len(source)))
        return self._op("mean", name, read[:1], {"axis": tuple(axes), "keepdims": keeps})

    def _gather(self, node: Any, name: str, read: list[str], _: Mapping[str, Any]) -> NodeOutput | None:
        if read[0] not in self.weights:
            raise UnsupportedError(f"{name} is a {node.op_type} of something computed, which is not followed here")
        rows, width = self._shape(read[0])[0], prod(self._shape(read[0])[1:])
        return self._op("Embedding", name, [read[1], read[0]], {"input_dim": rows, "output_dim": width})


_Builder = Callable[[_Reader, Any, str, list[str], Mapping[str, Any]], NodeOutput | None]
_BUILDERS: dict[str, _Builder] = {
    "Conv": _Reader._convolution, "MaxPool": _Reader._pooling, "AveragePool": _Reader._pooling,
    "GlobalAveragePool": _Reader._pooling, "GlobalMaxPool": _Reader._pooling, "Gemm": _Reader._gemm,
    "MatMul": _Reader._matmul, "BatchNormalization": _Reader._batch_norm, "LayerNormalization": _Reader._layer_norm,
    "Concat": _Reader._concat, "Transpose": _Reader._transpose, "ReduceMean": _Reader._mean, "Gather": _Reader._gather,
}  # fmt: skip
