"""The networks of DNNMem (FSE 2020) as MXNet's symbols, in the architecture of their PyTorch counterparts."""

from __future__ import annotations

from collections.abc import Callable

from overspill_papers.capture.mxnet.symbol import VARIABLE, Node, NodeOutput, Symbol

CLASSES = 1000
NO_LIMIT_MIB = 1 << 20
"""§5.1: "We did not limit the memory usage of the cuDNN workspace"."""


class Builder:
    """Adds operators by name; each one's weights are variables that the builder makes itself."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._variables: dict[str, NodeOutput] = {}

    def variable(self, name: str) -> NodeOutput:
        """Return the variable called `name`, made at its first use."""
        if name not in self._variables:
            self._variables[name] = self._add(Node(VARIABLE, name))
        return self._variables[name]

    def add(self, op: str, name: str, *read: NodeOutput, **attrs: object) -> NodeOutput:
        """Return the first output of a new operator."""
        return self._add(Node(op, name, read, {key: str(value) for key, value in attrs.items()}))

    def layer(self, op: str, name: str, data: NodeOutput, weights: tuple[str, ...], **attrs: object) -> NodeOutput:
        """Return an operator with weights named after it."""
        return self.add(op, name, data, *(self.variable(f"{name}_{weight}") for weight in weights), **attrs)

    def loss(self, data: NodeOutput) -> Symbol:
        """Return the network that ends in a softmax and its loss."""
        return self.made(self.add("SoftmaxOutput", "softmax", data, self.variable("softmax_label")))

    def made(self, *heads: NodeOutput) -> Symbol:
        """Return the network with these outputs."""
        return Symbol(tuple(self._nodes), heads)

    def _add(self, node: Node) -> NodeOutput:
        self._nodes.append(node)
        return NodeOutput(len(self._nodes) - 1, 0)

    def convolution(self, name: str, data: NodeOutput, filters: int, kernel: tuple[int, int], *, bias: bool = False,
                    stride: int = 1, pad: tuple[int, int] = (0, 0)) -> NodeOutput:  # fmt: skip
        """Return a convolution."""
        return self.layer(
            "Convolution", name, data, ("weight", "bias") if bias else ("weight",), num_filter=filters, kernel=kernel,
            stride=(stride, stride), pad=pad, no_bias=not bias, workspace=NO_LIMIT_MIB,
        )  # fmt: skip

    def batch_norm(self, name: str, data: NodeOutput) -> NodeOutput:
        """Return batch norm with a trained scale and bias."""
        return self.layer("BatchNorm", name, data, ("gamma", "beta", "moving_mean", "moving_var"), fix_gamma=False)

    def relu(self, name: str, data: NodeOutput) -> NodeOutput:
        """Return rectified linear units."""
        return self.add("Activation", name, data, act_type="relu")

    def pool(self, name: str, data: NodeOutput, kind: str, kernel: int, stride: int, pad: int = 0) -> NodeOutput:
        """Return maximum or average pooling."""
        return self.add(
            "Pooling", name, data, pool_type=kind, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad)
        )

    def dense(self, name: str, data: NodeOutput, hidden: int, *, flatten: bool = True) -> NodeOutput:
        """Return a fully connected layer."""
        return self.layer("FullyConnected", name, data, ("weight", "bias"), num_hidden=hidden, flatten=flatten)


def vgg16() -> Symbol:
    """Return VGG-16 (configuration D) with dropout."""
    net = Builder()
    x = net.variable("data")
    for group, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for i in range(1, count + 1):
            x = net.convolution(f"conv{group}_{i}", x, width, (3, 3), bias=True, pad=(1, 1))
            x = net.relu(f"relu{group}_{i}", x)
        x = net.pool(f"pool{group}", x, "max", 2, 2)
    x = net.add("Flatten", "flatten", x)
    for i in (6, 7):
        x = net.relu(f"relu{i}", net.dense(f"fc{i}", x, 4096))
        x = net.add("Dropout", f"drop{i}", x, p=0.5)
    return net.loss(net.dense("fc8", x, CLASSES))


def resnet50(*, early: bool = False) -> Symbol:
    """Return ResNet-50 with post-activation.

    A block's stride is in its 3x3 convolution, as in PyTorch. `early`: in its first 1x1 convolution, as in its paper
    (arXiv:1512.03385) and in Keras.
    """
    net = Builder()
    x = net.convolution("conv0", net.variable("data"), 64, (7, 7), stride=2, pad=(3, 3))
    x = net.relu("relu0", net.batch_norm("bn0", x))
    x = net.pool("pool0", x, "max", 3, 2, 1)
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for unit in range(1, count + 1):
            name = f"stage{stage}_unit{unit}"
            stride = 2 if unit == 1 < stage else 1
            strides = (stride, 1) if early else (1, stride)
            x = _bottleneck(net, name, x, width, strides, projects=unit == 1)
    x = net.add("Pooling", "pool1", x, pool_type="avg", global_pool=True, kernel=(7, 7))
    return net.loss(net.dense("fc1", net.add("Flatten", "flatten", x), CLASSES))


def _bottleneck(
    net: Builder, name: str, x: NodeOutput, width: int, strides: tuple[int, int], *, projects: bool
) -> NodeOutput:
    y = net.convolution(f"{name}_conv1", x, width, (1, 1), stride=strides[0])
    y = net.relu(f"{name}_relu1", net.batch_norm(f"{name}_bn1", y))
    y = net.convolution(f"{name}_conv2", y, width, (3, 3), stride=strides[1], pad=(1, 1))
    y = net.relu(f"{name}_relu2", net.batch_norm(f"{name}_bn2", y))
    y = net.batch_norm(f"{name}_bn3", net.convolution(f"{name}_conv3", y, 4 * width, (1, 1)))
    if projects:
        x = net.convolution(f"{name}_sc", x, 4 * width, (1, 1), stride=max(strides))
        x = net.batch_norm(f"{name}_sc_bn", x)
    return net.relu(f"{name}_relu3", net.add("elemwise_add", f"{name}_plus", y, x))


_STEM = "32 3x3/2, 32 3x3!, 64 3x3, max/2, 80 1x1, 192 3x3!, max/2"
_BLOCK_A = "64 1x1 | 48 1x1, 64 5x5 | 64 1x1, 96 3x3, 96 3x3 | avg, {pool} 1x1"
_BLOCK_B = "384 3x3/2 | 64 1x1, 96 3x3, 96 3x3/2 | max/2"
_BLOCK_C = (
    "192 1x1 | {mid} 1x1, {mid} 1x7, 192 7x1 | {mid} 1x1, {mid} 7x1, {mid} 1x7, {mid} 7x1, 192 1x7 | avg, 192 1x1"
)
_BLOCK_D = "192 1x1, 320 3x3/2 | 192 1x1, 192 1x7, 192 7x1, 192 3x3/2 | max/2"
_BLOCK_E = "320 1x1 | 384 1x1, (384 1x3 384 3x1) | 448 1x1, 384 3x3, (384 1x3 384 3x1) | avg, 192 1x1"
_INCEPTION = (
    *(_BLOCK_A.format(pool=pool) for pool in (32, 64, 64)),
    _BLOCK_B,
    *(_BLOCK_C.format(mid=mid) for mid in (128, 160, 160, 192)),
    _BLOCK_D,
    _BLOCK_E,
    _BLOCK_E,
)
"""Szegedy et al., arXiv:1512.00567, Figures 5 to 7 and 10: branches by `|`, what forks at their ends in brackets.

`64 3x3` is a convolution of 64 channels that keeps the size, `!` is not padded, `/2` halves, `avg` and `max` pool.
"""


def inception_v3() -> Symbol:
    """Return Inception v3 without its auxiliary classifier."""
    net = Builder()
    x = _branch(net, "stem", net.variable("data"), _STEM)[0]
    for number, block in enumerate(_INCEPTION):
        name = f"mixed{number}"
        ends = [
            end for i, text in enumerate(block.split(" | ")) for end in _branch(net, f"{name}_branch{i}", x, text)
        ]  # fmt: skip
        x = net.add("Concat", f"{name}_concat", *ends, num_args=len(ends), dim=1)
    x = net.add("Pooling", "pool", x, pool_type="avg", global_pool=True, kernel=(8, 8))
    x = net.add("Dropout", "drop", x, p=0.5)
    return net.loss(net.dense("fc1", net.add("Flatten", "flatten", x), CLASSES))


def _branch(net: Builder, name: str, x: NodeOutput, text: str) -> list[NodeOutput]:
    """Return the outputs of one branch: one, or those of the fork in which it ends."""
    for number, item in enumerate(text.split(", ")):
        if item.startswith("("):
            width, kernels = item[1:-1].split()[0], item[1:-1].split()[1::2]
            return [
                _unit(net, f"{name}_{number}{kernel}", x, f"{width} {kernel}") for kernel in kernels
            ]  # fmt: skip
        x = _unit(net, f"{name}_{number}", x, item)
    return [x]


def _unit(net: Builder, name: str, x: NodeOutput, text: str) -> NodeOutput:
    """Return a convolution, batch norm and ReLU; or a pooling."""
    text, stride = (text[:-2], 2) if text.endswith("/2") else (text, 1)
    if text in {"avg", "max"}:
        return net.pool(name, x, text, 3, stride, pad=2 - stride)
    width, kernel = text.rstrip("!").split()
    height, breadth = (int(size) for size in kernel.split("x"))
    padded = stride == 1 and not text.endswith("!")
    pad = (height // 2, breadth // 2) if padded else (0, 0)
    made = net.convolution(name, x, int(width), (height, breadth), stride=stride, pad=pad)
    return net.relu(f"{name}_relu", net.batch_norm(f"{name}_bn", made))


def lstm(width: int = 5120, steps: int = 100, layers: int = 2) -> Symbol:
    """Return LSTM cells, unrolled as by `mx.rnn.LSTMCell`, step by step and layer by layer.

    The loss is the mean of all outputs.
    """
    net = Builder()
    sequence = net.variable("data")
    parts = _split(net, "steps", sequence, steps, axis=0, squeeze_axis=True)
    for layer in range(layers):
        hidden, cell = net.variable(f"lstm{layer}_begin_h"), net.variable(f"lstm{layer}_begin_c")
        outputs = []
        for step, x in enumerate(parts):
            hidden, cell = _cell(net, f"lstm{layer}", f"lstm{layer}_t{step}", x, hidden, cell, width)
            outputs.append(hidden)
        parts = outputs
    joined = net.add("Concat", "outputs", *parts, num_args=steps, dim=0)
    return net.made(net.add("MakeLoss", "loss", net.add("mean", "mean", joined)))


def _cell(
    net: Builder, weights: str, name: str, x: NodeOutput, hidden: NodeOutput, cell: NodeOutput, width: int
) -> tuple[NodeOutput, NodeOutput]:
    """Return the next hidden state and cell of `mx.rnn.LSTMCell`."""
    gates = net.add(
        "elemwise_add", f"{name}_gates",
        *(
            net.add(
                "FullyConnected", f"{name}_{way}", data, net.variable(f"{weights}_{way}_weight"),
                net.variable(f"{weights}_{way}_bias"), num_hidden=4 * width,
            )
            for way, data in (("i2h", x), ("h2h", hidden))
        ),
    )  # fmt: skip
    # Gates, then the cell's new state and output.
    kinds = ("sigmoid", "sigmoid", "tanh", "sigmoid")
    i, f, c, o = (
        net.add("Activation", f"{name}_{gate}", part, act_type=kind)
        for gate, kind, part in zip("ifco", kinds, _split(net, f"{name}_slice", gates, 4), strict=True)
    )
    kept = net.add("elemwise_mul", f"{name}_kept", f, cell)
    cell = net.add("elemwise_add", f"{name}_state", kept, net.add("elemwise_mul", f"{name}_new", i, c))
    return net.add("elemwise_mul", f"{name}_out", o, net.add("Activation", f"{name}_tanh", cell, act_type="tanh")), cell


def _split(net: Builder, name: str, data: NodeOutput, count: int, **attrs: object) -> list[NodeOutput]:
    first = net.add("SliceChannel", name, data, num_outputs=count, **attrs)
    return [NodeOutput(first.node, index) for index in range(count)]


def bert(*, layers: int = 12, width: int = 768, heads: int = 12, words: int = 30522) -> Symbol:
    """Return BERT with a classifier of two classes, as GluonNLP 0.7 writes it.

    It follows `model/bert.py` and `model/attention_cell.py`.
    """
    net = Builder()
    x = net.add(
        "elemwise_add", "embedded",
        *(
            net.layer("Embedding", name, net.variable(data), ("weight",), input_dim=rows, output_dim=width)
            for name, data, rows in (("word", "data", words), ("segment", "segments", 2))
        ),
    )  # fmt: skip
    # Positions, added to the embedded words and segments.
    positions = net.layer(
        "Embedding", "position", net.variable("positions"), ("weight",), input_dim=512, output_dim=width
    )
    x = net.add("broadcast_add", "placed", x, positions)
    x = net.add("Dropout", "embedded_drop", net.layer("LayerNorm", "embedded_norm", x, ("gamma", "beta")), p=0.1)
    for layer in range(layers):
        name = f"layer{layer}"
        x = _residual(net, f"{name}_attention", x, _attention(net, f"{name}_attention", x, width, heads))
        hidden = _gelu(net, f"{name}_gelu", net.dense(f"{name}_ffn1", x, 4 * width, flatten=False))
        x = _residual(net, f"{name}_ffn", x, net.dense(f"{name}_ffn2", hidden, width, flatten=False))
    # The classifier reads the first token.
    first = net.add("Reshape", "first", net.add("slice_axis", "cls", x, axis=1, begin=0, end=1), shape=(0, -1))
    pooled = net.add("Activation", "pooled", net.dense("pooler", first, width), act_type="tanh")
    return net.loss(net.dense("classifier", net.add("Dropout", "pooled_drop", pooled, p=0.1), 2))


def _residual(net: Builder, name: str, x: NodeOutput, branch: NodeOutput) -> NodeOutput:
    total = net.add("elemwise_add", f"{name}_plus", net.add("Dropout", f"{name}_drop", branch, p=0.1), x)
    return net.layer("LayerNorm", f"{name}_norm", total, ("gamma", "beta"))


def _attention(net: Builder, name: str, x: NodeOutput, width: int, heads: int) -> NodeOutput:
    """Return attention with scores masked before the softmax.

    The softmax's result is masked again (`_masked_softmax`).
    """
    query, key, value = (
        net.add(
            "Reshape", f"{name}_{part}_flat",
            net.add(
                "transpose", f"{name}_{part}_heads",
                net.add(
                    "Reshape", f"{name}_{part}_split", net.dense(f"{name}_{part}", x, width, flatten=False),
                    shape=(0, 0, heads, width // heads),
                ),
                axes=(0, 2, 1, 3),
            ),
            shape=(-3, 0, 0),
        )
        for part in ("query", "key", "value")
    )  # fmt: skip
    # Masked attention weights.
    query = net.add("_contrib_div_sqrt_dim", f"{name}_scaled", query)
    scores = net.add("batch_dot", f"{name}_scores", query, key, transpose_b=True)
    mask, nothing = net.variable("mask"), net.variable("minus_infinity")
    weights = net.add("softmax", f"{name}_softmax", net.add("where", f"{name}_where", mask, scores, nothing), axis=-1)
    weights = net.add("elemwise_mul", f"{name}_masked", weights, mask)
    # Weigh the values, and join the heads.
    context = net.add("batch_dot", f"{name}_context", net.add("Dropout", f"{name}_weights", weights, p=0.1), value)
    context = net.add("Reshape", f"{name}_by_head", context, shape=(-4, -1, heads, 0, 0))
    context = net.add("transpose", f"{name}_joined", context, axes=(0, 2, 1, 3))
    joined = net.add("Reshape", f"{name}_flat", context, shape=(0, 0, -3))
    return net.dense(f"{name}_out", joined, width, flatten=False)


def _gelu(net: Builder, name: str, x: NodeOutput) -> NodeOutput:
    """Return 0.5 x (1 + erf(x / sqrt 2)), in elementary operators."""
    half = net.add("_mul_scalar", f"{name}_half", x, scalar=0.5)
    error = net.add("erf", f"{name}_erf", net.add("_div_scalar", f"{name}_divided", x, scalar=1.4142))
    return net.add("elemwise_mul", f"{name}_out", half, net.add("_plus_scalar", f"{name}_plus", error, scalar=1.0))


NETWORKS: dict[str, Callable[[], Symbol]] = {
    "VGG16": vgg16, "ResNet50": resnet50, "InceptionV3": inception_v3, "LSTM": lstm, "BERT": bert,
}  # fmt: skip
