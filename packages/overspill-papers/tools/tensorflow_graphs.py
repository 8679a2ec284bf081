"""Traces DNNMem's networks with an installed TensorFlow, as TensorFlow 1 builds them, for `overspill reproduce dnnmem`.

    python tools/tensorflow_graphs.py [--only NAME] [--out FOLDER]

Needs the extra `tensorflow`; nothing is run. Each graph is a training step in graph mode, with tf.gradients and the
optimizer's ops, traced at two batch sizes between which all shapes are lines, and stored for every batch.

Convolutional networks are those of `overspill_papers.papers.symbols`, op by op: channels first, which is what TensorFlow's layout
optimizer makes of them on a GPU; fused batch norm that trains, or (`-fixed`) batch norm of fixed statistics and untrained
scale, spelled out, as `tf.nn.batch_normalization` does it. BERT is that of google-research/bert of 2018 (`modeling.py`,
`optimization.py`), with tf.nn.dropout and layer_norm as TensorFlow 1.12 spells them out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill_papers.capture.mxnet.symbol import Node, NodeOutput, Symbol
from overspill_papers.capture.tensorflow.graph import StepGraph, save, stored
from overspill_papers.capture.tensorflow.trace import installed, of_session_graph
from overspill_papers.papers import symbols

FOLDER = Path(symbols.__file__).parent / "tensorflow"
BATCHES = (3, 5)
_tf: Any = None


def tf() -> Any:
    """TensorFlow 1's interface."""
    global _tf  # noqa: PLW0603  # it takes seconds to import, and not for `--help`
    if _tf is None:
        installed()
        _tf = importlib.import_module("tensorflow.compat.v1")
        _tf.disable_v2_behavior()
    return _tf


def variable(name: str, shape: list[int], *, trains: bool = True) -> Any:
    """A variable of float32."""
    return tf().get_variable(name, shape, trainable=trains, use_resource=False)


class Layers:
    """A symbol's nodes as TensorFlow's ops."""

    def __init__(self, symbol: Symbol, *, fixed: bool) -> None:
        self.symbol, self.fixed = symbol, fixed
        self.made: dict[NodeOutput, Any] = {}

    def logits(self, images: Any) -> Any:
        """What goes into the softmax at the end."""
        for position, node in enumerate(self.symbol.nodes):
            if node.op == "SoftmaxOutput":
                return self.made[node.inputs[0]]
            if node.name == "data":
                self.made[NodeOutput(position, 0)] = images
            elif not node.is_variable:
                read = [self.made[entry] for entry in node.inputs if entry in self.made]
                with tf().variable_scope(node.name):
                    self.made[NodeOutput(position, 0)] = getattr(self, node.op)(node, *read)
        raise ValueError("the symbol has no softmax")

    def Convolution(self, node: Node, x: Any) -> Any:  # noqa: N802
        rows, columns = node.numbers("kernel")
        stride, pad = node.numbers("stride", (1, 1)), node.numbers("pad", (0, 0))
        weight = variable("weight", [rows, columns, x.shape[1].value, node.number("num_filter", 0)])
        same = stride == (1, 1) and pad == (rows // 2, columns // 2)
        if any(pad) and not same:
            x = tf().pad(x, [[0, 0], [0, 0], [pad[0], pad[0]], [pad[1], pad[1]]])
        padding = "SAME" if same else "VALID"
        x = tf().nn.conv2d(x, weight, [1, 1, *stride], padding, data_format="NCHW")
        if node.flag("no_bias"):
            return x
        return tf().nn.bias_add(x, variable("bias", [x.shape[1].value]), data_format="NCHW")

    def BatchNorm(self, node: Node, x: Any) -> Any:  # noqa: N802, ARG002
        channels = [x.shape[1].value]
        if self.fixed:
            across = [1, *channels, 1, 1]
            scale, offset, mean, variance = (
                tf().reshape(variable(name, channels, trains=False), across) for name in ("scale", "offset", "mean", "variance")
            )  # fmt: skip
            return tf().nn.batch_normalization(x, mean, variance, offset, scale, 1e-5)
        scale, offset = variable("scale", channels), variable("offset", channels)
        return tf().nn.fused_batch_norm(x, scale, offset, data_format="NCHW", is_training=True)[0]

    def Activation(self, node: Node, x: Any) -> Any:  # noqa: N802, ARG002
        return tf().nn.relu(x)

    def Pooling(self, node: Node, x: Any) -> Any:  # noqa: N802
        if node.flag("global_pool"):
            return tf().reduce_mean(x, [2, 3], keepdims=True)
        pool = tf().nn.max_pool if node.attrs["pool_type"] == "max" else tf().nn.avg_pool
        padding = "SAME" if any(node.numbers("pad")) else "VALID"
        return pool(x, [1, 1, *node.numbers("kernel")], [1, 1, *node.numbers("stride")], padding, data_format="NCHW")

    def Flatten(self, node: Node, x: Any) -> Any:  # noqa: N802, ARG002
        return tf().reshape(x, [x.shape[0].value, -1])

    def FullyConnected(self, node: Node, x: Any) -> Any:  # noqa: N802
        return dense(x, node.number("num_hidden", 0))

    def Dropout(self, node: Node, x: Any) -> Any:  # noqa: N802
        return dropout(x, float(node.attrs["p"]))

    def Concat(self, node: Node, *read: Any) -> Any:  # noqa: N802, ARG002
        return tf().concat(list(read), 1)

    def elemwise_add(self, node: Node, x: Any, y: Any) -> Any:  # noqa: ARG002
        return x + y


def dense(x: Any, width: int) -> Any:
    """A product and a bias."""
    return tf().nn.bias_add(tf().matmul(x, variable("weight", [x.shape[-1].value, width])), variable("bias", [width]))


def dropout(x: Any, rate: float) -> Any:
    """tf.nn.dropout as TensorFlow 1.12 has it: x / keep times the floor of noise and keep."""
    noise = tf().random_uniform(x.shape) + (1 - rate)
    return tf().math.divide(x, 1 - rate) * tf().floor(noise)


def layer_norm(x: Any) -> Any:
    """tf.contrib.layers.layer_norm: moments, and batch_normalization over the last dimension."""
    width = [x.shape[-1].value]
    offset, scale = variable("beta", width), variable("gamma", width)
    mean, variance = tf().nn.moments(x, [-1], keep_dims=True)
    return tf().nn.batch_normalization(x, mean, variance, offset, scale, 1e-12)


def bert(batch: int, length: int, layers: int = 12, width: int = 768, heads: int = 12) -> Any:
    """The mean loss of BERT's classifier of two classes."""
    ids, segments, mask = (tf().placeholder("int32", [batch, length], name) for name in ("ids", "segments", "mask"))
    labels = tf().placeholder("int32", [batch], "labels")
    with tf().variable_scope("embeddings"):
        words, positions = variable("words", [30522, width]), variable("positions", [512, width])
        x = tf().reshape(tf().gather(words, tf().reshape(ids, [-1])), [batch, length, width])
        kinds = tf().matmul(tf().one_hot(tf().reshape(segments, [-1]), 2), variable("segments", [2, width]))
        x += tf().reshape(kinds, [batch, length, width])
        x += tf().reshape(tf().slice(positions, [0, 0], [length, width]), [1, length, width])
        x = dropout(layer_norm(x), 0.1)
    across = tf().ones([batch, length, 1]) * tf().cast(tf().reshape(mask, [batch, 1, length]), "float32")
    x = tf().reshape(x, [batch * length, width])
    for layer in range(layers):
        with tf().variable_scope(f"layer{layer}"):
            attended = _attention(x, across, batch, length, heads, width // heads)
            x = _after(x, attended, "attention")
            with tf().variable_scope("ffn1"):
                hidden = dense(x, 4 * width)
                hidden *= 0.5 * (1.0 + tf().erf(hidden / 1.4142))
            with tf().variable_scope("ffn2"):
                answer = dense(hidden, width)
            x = _after(x, answer, "ffn")
    with tf().variable_scope("pooler"):
        first = tf().squeeze(tf().reshape(x, [batch, length, width])[:, 0:1, :], axis=1)
        first = dropout(tf().tanh(dense(first, width)), 0.1)
    with tf().variable_scope("classifier"):
        chances = tf().nn.log_softmax(dense(first, 2))
        return tf().reduce_mean(-tf().reduce_sum(tf().one_hot(labels, 2) * chances, axis=-1))


def _attention(x: Any, across: Any, batch: int, length: int, heads: int, size: int) -> Any:
    parts = []
    for name in ("query", "key", "value"):
        with tf().variable_scope(name):
            parts.append(
                tf().transpose(tf().reshape(dense(x, heads * size), [batch, length, heads, size]), [0, 2, 1, 3])
            )
    scores = tf().matmul(parts[0], parts[1], transpose_b=True) * (size**-0.5)
    scores += (1.0 - tf().expand_dims(across, 1)) * -10000.0
    context = tf().matmul(dropout(tf().nn.softmax(scores), 0.1), parts[2])
    return tf().reshape(tf().transpose(context, [0, 2, 1, 3]), [batch * length, heads * size])


def _after(x: Any, branch: Any, name: str) -> Any:
    with tf().variable_scope(f"{name}_out"):
        if name == "attention":
            branch = dense(branch, x.shape[-1].value)
        return layer_norm(dropout(branch, 0.1) + x)


def adam_with_decay(loss: Any) -> tuple[Any, list[str]]:
    """`optimization.py` of google-research/bert: gradients clipped by their norm, and Adam spelled out."""
    trained = tf().trainable_variables()
    gradients, _ = tf().clip_by_global_norm(tf().gradients(loss, trained), 1.0)
    updates, states = [], []
    for weight, gradient in zip(trained, gradients, strict=True):
        with tf().variable_scope(f"adam/{weight.op.name}"):
            m, v = (variable(name, weight.shape.as_list(), trains=False) for name in ("m", "v"))
        states += [m.op.name, v.op.name]
        next_m = tf().multiply(0.9, m) + tf().multiply(0.1, gradient)
        next_v = tf().multiply(0.999, v) + tf().multiply(0.001, tf().square(gradient))
        update = next_m / (tf().sqrt(next_v) + 1e-6) + 0.01 * weight
        updates += [weight.assign(weight - 2e-5 * update), m.assign(next_m), v.assign(next_v)]
    return tf().group(*updates), states


def images(network: Callable[[], Symbol], side: int, *, fixed: bool = False) -> Callable[[int], StepGraph]:
    """A convolutional network of `overspill_papers.papers.symbols`, trained by plain SGD."""

    def made(batch: int) -> StepGraph:
        with tf().Graph().as_default() as graph:
            x = tf().placeholder("float32", [batch, 3, side, side], "images")
            labels = tf().placeholder("int32", [batch], "labels")
            logits = Layers(network(), fixed=fixed).logits(x)
            loss = tf().reduce_mean(tf().nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
            trained = tf().trainable_variables()
            # As Keras asks for them; compute_gradients would make each op wait for all gradients of the one before.
            gradients = zip(tf().gradients(loss, trained), trained, strict=True)
            train = tf().train.GradientDescentOptimizer(0.01).apply_gradients(gradients)
            return _step(graph, [loss.op, train], [])

    return made


def text(length: int) -> Callable[[int], StepGraph]:
    """BERT on lines of so many tokens."""

    def made(batch: int) -> StepGraph:
        with tf().Graph().as_default() as graph:
            loss = bert(batch, length)
            train, states = adam_with_decay(loss)
            return _step(graph, [loss.op, train], states)

    return made


def _step(graph: Any, fetches: list[Any], states: list[str]) -> StepGraph:
    trained = [weight.op.name for weight in tf().trainable_variables()]
    return of_session_graph(graph, fetches, trained, states).pruned()


_RESNET = partial(symbols.resnet50, early=True)  # Keras' own
GRAPHS: dict[str, Callable[[int], StepGraph]] = {
    "vgg16": images(symbols.vgg16, 224),
    "resnet50": images(_RESNET, 224),
    "resnet50-fixed": images(_RESNET, 224, fixed=True),
    "inception-v3-fixed": images(symbols.inception_v3, 299, fixed=True),
    "bert-32": text(32),
    "bert-64": text(64),
    "bert-128": text(128),
}


def main(
    only: Annotated[str, typer.Option(help="Only graphs with this in their name.")] = "",
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = FOLDER,
) -> None:
    """Trace and store the graphs."""
    out.mkdir(exist_ok=True)
    for name, made in GRAPHS.items():
        if only in name:
            data = stored(made(BATCHES[0]), made(BATCHES[1]), BATCHES)
            save(out / f"{name}.json.gz", data)
            print(f"{name:20} {len(data['ops']):6} ops, {(out / f'{name}.json.gz').stat().st_size:8} bytes", flush=True)


if __name__ == "__main__":
    typer.run(main)
