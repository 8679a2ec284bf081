"""ONNX's operators as MXNet's, as its own importer maps them (`contrib/onnx/onnx2mx/_op_translations.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from overspill.core.errors import UnsupportedError
from overspill_papers.capture.mxnet.backward import TRAINED
from overspill_papers.capture.mxnet.layer_shapes import GATES
from overspill_papers.capture.mxnet.shapes import Shape
from overspill_papers.capture.mxnet.symbol import VARIABLE, Node, NodeOutput

from .known import KnownValues

# ONNX's operator: MXNet's, and its attributes.
_PLAIN: dict[str, tuple[str, dict[str, str]]] = {
    "Relu": ("Activation", {"act_type": "relu"}), "Sigmoid": ("Activation", {"act_type": "sigmoid"}),
    "Tanh": ("Activation", {"act_type": "tanh"}), "Softplus": ("Activation", {"act_type": "softrelu"}),
    "LeakyRelu": ("LeakyReLU", {}), "Elu": ("LeakyReLU", {"act_type": "elu"}),
    "Selu": ("LeakyReLU", {"act_type": "selu"}), "Gelu": ("LeakyReLU", {"act_type": "gelu"}),
    "PRelu": ("LeakyReLU", {"act_type": "prelu"}), "HardSigmoid": ("hard_sigmoid", {}), "Mish": ("hard_sigmoid", {}),
    "Clip": ("clip", {}), "Erf": ("erf", {}), "Sqrt": ("sqrt", {}), "Exp": ("exp", {}), "Log": ("log", {}),
    "Sin": ("sin", {}), "Cos": ("cos", {}), "Abs": ("abs", {}), "Neg": ("negative", {}), "Softsign": ("softsign", {}),
    "Reciprocal": ("reciprocal", {}), "Floor": ("floor", {}), "Ceil": ("floor", {}), "Round": ("round", {}),
    "Sign": ("sign", {}), "Softmax": ("softmax", {}), "LogSoftmax": ("log_softmax", {}), "Add": ("broadcast_add", {}),
    "Sub": ("broadcast_sub", {}), "Mul": ("broadcast_mul", {}), "Div": ("broadcast_div", {}),
    "Max": ("broadcast_maximum", {}), "Min": ("broadcast_minimum", {}), "Where": ("where", {}),
    "Dropout": ("Dropout", {}), "Cast": ("_copy", {}), "CastLike": ("_copy", {}), "Sum": ("ElementWiseSum", {}),
    "LRN": ("LRN", {}), "InstanceNormalization": ("InstanceNorm", {}), "LpNormalization": ("L2Normalization", {}),
    "Equal": ("broadcast_equal", {}), "Greater": ("broadcast_greater", {}), "Less": ("broadcast_lesser", {}),
    "GreaterOrEqual": ("broadcast_greater_equal", {}), "LessOrEqual": ("broadcast_lesser_equal", {}),
    "And": ("broadcast_logical_and", {}), "Or": ("broadcast_logical_or", {}), "Xor": ("broadcast_logical_xor", {}),
    "ScatterND": ("_scatter_set_nd", {}), "ScatterElements": ("_scatter_set_nd", {}),
    "Mod": ("broadcast_mod", {}), "Not": ("_equal_scalar", {}), "IsNaN": ("_equal_scalar", {}),
    "IsInf": ("_equal_scalar", {}),
}  # fmt: skip
_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_FIRST_ONLY = frozenset({"Clip", "CastLike", "Dropout", *_RESHAPES})
"""Operators whose further inputs are settings."""
_REDUCTIONS = {
    "ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod",
    "ReduceL1": "norm", "ReduceL2": "norm",
}  # fmt: skip


class SymbolNodes:
    """The nodes of a symbol, to which ONNX's are added in their order."""

    def __init__(self, onnx: Any, known: KnownValues) -> None:
        self._onnx, self.known = onnx, known
        self.nodes: list[Node] = []
        self.place: dict[str, NodeOutput] = {}
        self._transposed: dict[str, str] = {}
        """Transposed weights, by the name of the weight."""

    def variable(self, name: str) -> NodeOutput:
        """Add an input of the network."""
        return self.add(Node(VARIABLE, name))

    def add(self, node: Node) -> NodeOutput:
        """Return the first output of a new node."""
        self.nodes.append(node)
        return NodeOutput(len(self.nodes) - 1, 0)

    def read(self, node: Any, name: str) -> None:
        """Add what an ONNX node computes. Raises UnsupportedError for an operator that is not known here."""
        attrs = {attribute.name: self._onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        read = [each for each in node.input if each]
        made = _BUILDERS.get(node.op_type, SymbolNodes._plain)(self, node, name, read, attrs)
        if isinstance(made, NodeOutput):
            made = [NodeOutput(made.node, index) for index in range(len(node.output))]
        self.place |= {output: entry for output, entry in zip(node.output, made, strict=False) if output}

    def alias(self, name: str, source: str) -> None:
        """Give the value `source` another name."""
        self.known.alias(name, source)
        if not self.known.is_constant(source):
            self.place[name] = self._entry(source)

    def _op(self, op: str, name: str, read: Sequence[str | NodeOutput], attrs: Mapping[str, object]) -> NodeOutput:
        entries = tuple(each if isinstance(each, NodeOutput) else self._entry(each) for each in read)
        return self.add(Node(op, name, entries, {key: str(value) for key, value in attrs.items()}))

    def _entry(self, name: str) -> NodeOutput:
        """Return the entry of a value. A weight or a constant becomes a variable when it is first read."""
        if name not in self.place:
            attrs = {"__shape__": str(self.known.shape(name) or (1,))}
            if name not in self.known.weights:
                attrs[TRAINED] = "null"
            self.place[name] = self.add(Node(VARIABLE, name, (), attrs))
        return self.place[name]

    def _reshaped(self, name: str, entry: str | NodeOutput, shape: Shape) -> NodeOutput:
        return self._op("Reshape", name, [entry], {"shape": shape or (1,)})

    def _plain(self, node: Any, name: str, read: list[str], _: Mapping[str, Any]) -> NodeOutput:
        if node.op_type in _RESHAPES:
            return self._reshaped(name, read[0], self._shape(node.output[0]))
        if node.op_type not in _PLAIN:
            raise UnsupportedError(
                f"{name} is an operator {node.op_type} of ONNX, which is not known here; known: "
                f"{', '.join(sorted({*_PLAIN, *_RESHAPES, *_BUILDERS}))}"
            )
        op, attrs = _PLAIN[node.op_type]
        return self._op(op, name, read[:1] if node.op_type in _FIRST_ONLY else read, attrs)

    def _shape(self, name: str) -> Shape:
        shape = self.known.shape(name)
        if 0 in shape:
            raise UnsupportedError(f"{name} is empty, a {shape}; simplify the model first")
        return shape

    def _identity(self, node: Any, _: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        self.alias(node.output[0], read[0])
        return self._entry(read[0])

    # --- Layers -------------------------------------------------------------------------------------------------------

    def _window(
        self, node: Any, name: str, kernel: Shape, attrs: Mapping[str, Any]
    ) -> tuple[str | NodeOutput, dict[str, object]]:
        """Return what a window goes over, and its attributes; odd padding is an operator of its own."""
        size = len(kernel)
        stride, dilate = (tuple(attrs.get(key, (1,) * size)) for key in ("strides", "dilations"))
        pads = tuple(attrs.get("pads", (0,) * 2 * size))
        begin, end = pads[:size], pads[size:]
        if attrs.get("auto_pad", b"NOTSET") in {b"SAME_UPPER", b"SAME_LOWER"}:
            before, after = self._shape(node.input[0])[2:], self._shape(node.output[0])[2:]
            sizes = zip(before, after, kernel, stride, dilate, strict=True)
            total = [max(0, (made - 1) * s + d * (k - 1) + 1 - image) for image, made, k, s, d in sizes]
            begin, end = tuple(t // 2 for t in total), tuple(-(-t // 2) for t in total)
        data: str | NodeOutput = node.input[0]
        if begin != end:
            width = (0, 0, 0, 0, *(each for pair in zip(begin, end, strict=True) for each in pair))
            data = self._op("Pad", f"{name}_pad", [data], {"mode": "constant", "pad_width": width})
            begin = (0,) * size
        return data, {"kernel": kernel, "stride": stride, "dilate": dilate, "pad": begin}

    def _convolution(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        weight = self._shape(read[1])
        data, window = self._window(node, name, weight[2:], attrs)
        settings = {"num_filter": weight[0], "num_group": attrs.get("group", 1), "no_bias": len(read) < 3}
        return self._op("Convolution", name, [data, *read[1:]], window | settings)

    def _deconvolution(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        weight, group, made = self._shape(read[1]), attrs.get("group", 1), self._shape(node.output[0])
        return self._op("Deconvolution", name, read, {
            "num_filter": weight[1] * group, "kernel": weight[2:], "target_shape": made[2:], "num_group": group,
            "stride": tuple(attrs.get("strides", (1,) * len(weight[2:]))), "no_bias": len(read) < 3,
        })  # fmt: skip

    def _pooling(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        kind = "max" if "Max" in node.op_type else "avg"
        if node.op_type.startswith("Global"):
            return self._op("Pooling", name, read, {"pool_type": kind, "global_pool": True})
        data, window = self._window(node, name, tuple(attrs["kernel_shape"]), attrs)
        convention = "full" if attrs.get("ceil_mode") else "valid"
        return self._op("Pooling", name, [data], window | {"pool_type": kind, "pooling_convention": convention})

    def _gemm(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        weight = self._shape(read[1])
        hidden = weight[0] if attrs.get("transB") else weight[1]
        return self._op("FullyConnected", name, read, {"num_hidden": hidden, "no_bias": len(read) < 3})

    def _matmul(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        weight = self._transposed.get(read[1], read[1])
        if weight in self.known.weights and len(self._shape(weight)) == 2 and len(self._shape(read[0])) > 1:
            hidden = self._shape(read[1])[1]
            return self._op(
                "FullyConnected", name, [read[0], weight], {"num_hidden": hidden, "no_bias": True, "flatten": False}
            )
        return self._op("batch_dot", name, read, {})

    def _batch_norm(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        return self._op("BatchNorm", name, read, {"fix_gamma": False})

    def _layer_norm(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("LayerNorm", name, read, {"axis": attrs.get("axis", -1)})

    def _group_norm(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("GroupNorm", name, read, {"num_groups": attrs["num_groups"]})

    def _recurrent(self, node: Any, name: str, _: list[str], attrs: Mapping[str, Any]) -> list[NodeOutput]:
        """Add LSTM, GRU or RNN: weights in one vector, and both directions of a step beside each other."""
        data, *rest = [*node.input, *[""] * 7][:8]
        weights, lengths, states, peepholes = rest[:3], rest[3], rest[4:6], rest[6]
        if lengths or peepholes or attrs.get("layout"):
            raise UnsupportedError(f"{name} has lengths, peepholes or a batch first, which are not followed here")
        mode = node.op_type.lower()
        if mode == "rnn":
            mode = "rnn_relu" if attrs.get("activations", [b"Tanh"])[0] == b"Relu" else "rnn_tanh"
        flat = [
            self._reshaped(f"{name}_flat{i}", weight, (prod(self._shape(weight)),))
            for i, weight in enumerate(weights) if weight
        ]  # fmt: skip
        parameters = self._op("_rnn_param_concat", f"{name}_parameters", flat, {"dim": 0, "num_args": len(flat)})
        # States that are not given are zeros.
        steps, batch, _width = self._shape(data)
        directions, state = self._shape(weights[0])[0], self._shape(weights[0])[1] // GATES[mode]
        shape = (directions, batch, state)
        given = states[: 2 if mode == "lstm" else 1]
        first = [each or self._op("_zeros", f"{name}_zeros{i}", [], {"shape": shape}) for i, each in enumerate(given)]
        made = self._op("RNN", name, [data, parameters, *first], {
            "state_size": state, "num_layers": 1, "mode": mode, "bidirectional": directions == 2,
            "state_outputs": len(node.output) > 1,
        })  # fmt: skip
        output = self._reshaped(f"{name}_steps", made, (steps, batch, directions, state))
        if directions == 2:
            output = self._op("SwapAxis", f"{name}_directions", [output], {"dim1": 1, "dim2": 2})
        else:
            output = self._reshaped(f"{name}_directions", made, (steps, 1, batch, state))
        return [output, NodeOutput(made.node, 1), NodeOutput(made.node, 2)]

    # --- Parts and shapes ---------------------------------------------------------------------------------------------

    def _resize(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        before, made = self._shape(read[0]), self._shape(node.output[0])
        if len(made) != 4 or before[:2] != made[:2]:
            raise UnsupportedError(f"{name} resizes a {before} to {made}; only images are followed here")
        scale = made[2] // before[2]
        if attrs.get("mode", b"nearest") == b"nearest" and made[2:] == tuple(size * scale for size in before[2:]):
            return self._op("UpSampling", name, read[:1], {"scale": scale, "sample_type": "nearest"})
        return self._op("_contrib_BilinearResize2D", name, read[:1], {"height": made[2], "width": made[3]})

    def _concat(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        return self._op("Concat", name, read, {"dim": attrs["axis"], "num_args": len(read)})

    def _split(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput | list[NodeOutput]:
        axis = attrs.get("axis", 0) % len(self._shape(read[0]))
        sizes = [self._shape(output)[axis] for output in node.output]
        if len(set(sizes)) == 1:
            return self._op("SliceChannel", name, read[:1], {"num_outputs": len(sizes), "axis": axis})
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            self._op("slice_axis", f"{name}_{i}", read[:1], {"axis": axis, "begin": end - size, "end": end})
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]

    def _slice(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        data = self._shape(read[0])
        if "starts" in attrs:  # before version 10
            starts, ends, axes, steps = attrs["starts"], attrs["ends"], attrs.get("axes"), None
        else:
            starts, ends, axes, steps = [*map(self.known.integers, read[1:]), None, None][:4]
        parts = [range(size) for size in data]
        for i, axis in enumerate(axes or range(len(starts))):
            parts[axis] = parts[axis][slice(starts[i], ends[i], steps[i] if steps else 1)]
        if not all(parts):
            raise UnsupportedError(f"{name} makes nothing of a {data}; simplify the model first")
        return self._op("slice", name, read[:1], {
            "begin": tuple(part.start for part in parts),
            "end": tuple(None if part.stop < 0 else part.stop for part in parts), "step": tuple(p.step for p in parts),
        })  # fmt: skip

    def _transpose(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        if read[0] in self.known.weights and len(self._shape(read[0])) == 2:
            self._transposed[node.output[0]] = read[0]
        return self._op("transpose", name, read, {"axes": tuple(attrs["perm"])} if "perm" in attrs else {})

    def _expand(self, node: Any, name: str, read: list[str], _: Mapping[str, Any]) -> NodeOutput:
        return self._op("broadcast_to", name, read[:1], {"shape": self._shape(node.output[0])})

    def _tile(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        return self._op("tile", name, read[:1], {"reps": tuple(self.known.integers(read[1]))})

    def _pad(self, _: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        pads = list(attrs["pads"]) if "pads" in attrs else self.known.integers(read[1])
        half = len(pads) // 2
        if len(read) > 3:  # the axes are given
            axes, rank = self.known.integers(read[3]), len(self._shape(read[0]))
            begin, end = (dict(zip((a % rank for a in axes), part, strict=True)) for part in (pads[:half], pads[half:]))
            pads = [side.get(axis, 0) for side in (begin, end) for axis in range(rank)]
            half = rank
        width = tuple(each for pair in zip(pads[:half], pads[half:], strict=True) for each in pair)
        return self._op("Pad", name, read[:1], {"pad_width": width})

    def _block(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        op = "depth_to_space" if node.op_type == "DepthToSpace" else "space_to_depth"
        return self._op(op, name, read, {"block_size": attrs["blocksize"]})

    def _reduction(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        axes = attrs.get("axes")
        if axes is None and len(read) > 1:  # an input in later versions
            axes = self.known.integers(read[1])
        axes = axes or range(len(self._shape(read[0])))
        keeps = bool(attrs.get("keepdims", 1))
        return self._op(_REDUCTIONS[node.op_type], name, read[:1], {"axis": tuple(axes), "keepdims": keeps})

    def _argument(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        op = node.op_type.lower()
        return self._op(op, name, read, {"axis": attrs.get("axis", 0), "keepdims": bool(attrs.get("keepdims", 1))})

    # --- Element by element, and by indices ---------------------------------------------------------------------------

    def _power(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        if self.known.is_constant(read[1]):
            return self._op("_power_scalar", name, read[:1], {})
        return self._op("broadcast_power", name, read, {})

    def _hard_swish(self, _: Any, name: str, read: list[str], __: Mapping[str, Any]) -> NodeOutput:
        return self._op("elemwise_mul", name, [read[0], self._op("hard_sigmoid", f"{name}_gate", read, {})], {})

    def _gather(self, node: Any, name: str, read: list[str], attrs: Mapping[str, Any]) -> NodeOutput:
        data, axis = self._shape(read[0]), attrs.get("axis", 0)
        if read[0] in self.known.weights and axis == 0 and self._shape(read[1]):
            width = prod(data[1:])
            return self._op("Embedding", name, [read[1], read[0]], {"input_dim": data[0], "output_dim": width})
        if self.known.is_constant(read[1]) and not self._shape(read[1]):
            begin = self.known.integers(read[1])[0] % data[axis]
            part = self._op("slice_axis", f"{name}_part", read[:1], {"axis": axis, "begin": begin, "end": begin + 1})
        else:
            part = self._op("take", f"{name}_part", read, {"axis": axis})
        return self._reshaped(name, part, self._shape(node.output[0]))


_Builder = Callable[[SymbolNodes, Any, str, list[str], Mapping[str, Any]], NodeOutput | list[NodeOutput]]
_BUILDERS: dict[str, _Builder] = {
    "Identity": SymbolNodes._identity, "Conv": SymbolNodes._convolution, "ConvTranspose": SymbolNodes._deconvolution,
    "MaxPool": SymbolNodes._pooling, "AveragePool": SymbolNodes._pooling, "GlobalAveragePool": SymbolNodes._pooling,
    "GlobalMaxPool": SymbolNodes._pooling, "Gemm": SymbolNodes._gemm, "MatMul": SymbolNodes._matmul,
    "BatchNormalization": SymbolNodes._batch_norm, "LayerNormalization": SymbolNodes._layer_norm,
    "GroupNormalization": SymbolNodes._group_norm, "LSTM": SymbolNodes._recurrent, "GRU": SymbolNodes._recurrent,
    "RNN": SymbolNodes._recurrent, "Resize": SymbolNodes._resize, "Upsample": SymbolNodes._resize,
    "Concat": SymbolNodes._concat, "Split": SymbolNodes._split, "Slice": SymbolNodes._slice,
    "Transpose": SymbolNodes._transpose, "Expand": SymbolNodes._expand, "Tile": SymbolNodes._tile,
    "Pad": SymbolNodes._pad, "DepthToSpace": SymbolNodes._block, "SpaceToDepth": SymbolNodes._block,
    **dict.fromkeys(_REDUCTIONS, SymbolNodes._reduction), "ArgMax": SymbolNodes._argument,
    "ArgMin": SymbolNodes._argument, "Pow": SymbolNodes._power, "HardSwish": SymbolNodes._hard_swish,
    "Gather": SymbolNodes._gather,
}  # fmt: skip
