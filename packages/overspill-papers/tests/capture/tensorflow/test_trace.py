"""Tracing with an installed TensorFlow; skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.capture.recording.recording import Recording
from overspill.core import TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.devices import load_device
from overspill_papers.capture.tensorflow.executor import record
from overspill_papers.capture.tensorflow.trace import trace

USER = """
import tensorflow as tf

def model():
    return tf.keras.Sequential([
        tf.keras.layers.Input((8, 8, 3)), tf.keras.layers.Conv2D(4, 3, activation="relu"),
        tf.keras.layers.Flatten(), tf.keras.layers.Dense(10),
    ])

def compiled():
    made = model()
    made.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made

def step(batch):
    weight = tf.Variable(tf.zeros([5, 7]))

    @tf.function
    def inner(x):
        return tf.matmul(x, weight)

    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(x))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return train, [tf.TensorSpec([batch, 5])]

L = tf.keras.layers

def network(*layers, shape=(9, 12), dtype="float32"):
    return lambda: tf.keras.Sequential([L.Input(shape, dtype=dtype), *[layer() for layer in layers]])

lstm = network(lambda: L.LSTM(16, return_sequences=True), lambda: L.LSTM(16), lambda: L.Dense(10))
unrolled = network(lambda: L.LSTM(16, return_sequences=True, unroll=True), lambda: L.LSTM(16, unroll=True), lambda: L.Dense(10))
gru = network(lambda: L.Bidirectional(L.GRU(8)), lambda: L.Dense(10))
simple = network(lambda: L.SimpleRNN(16))
masked = network(lambda: L.Embedding(50, 12, mask_zero=True), lambda: L.LSTM(16), shape=(9,), dtype="int32")
images = network(lambda: L.ConvLSTM2D(4, 3), L.Flatten, lambda: L.Dense(10), shape=(5, 8, 8, 3))
dropped = network(lambda: L.LSTM(16, dropout=0.2, recurrent_dropout=0.2))
stacked = network(lambda: L.RNN([L.LSTMCell(8), L.GRUCell(8)]))
distributed = network(lambda: L.TimeDistributed(L.Dense(4)), lambda: L.LSTM(6, go_backwards=True), lambda: L.Dense(2))

def loss(x, y, weight):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf.matmul(x, weight)))

def own_step(signature):
    weight = tf.Variable(tf.zeros([1024, 10]))
    specs = [tf.TensorSpec((None, 1024)), tf.TensorSpec((None,), tf.int32)]

    def train(x, y):
        with tf.GradientTape() as tape:
            value = loss(x, y, weight)
        weight.assign_sub(0.1 * tape.gradient(value, weight))
        return value

    return tf.function(train, input_signature=specs if signature else None), specs

def open_batch():
    return own_step(False)

def open_signature():
    return own_step(True)

def two_open():
    return (lambda x: x), [tf.TensorSpec((4, None))]

def loop_by_hand():
    cell = L.LSTMCell(16)
    cell.build((None, 12))

    def train(x):
        with tf.GradientTape() as tape:
            state = [tf.zeros((tf.shape(x)[0], 16))] * 2
            outputs = tf.TensorArray(tf.float32, size=tf.shape(x)[1])
            for i in tf.range(tf.shape(x)[1]):
                tf.autograph.experimental.set_loop_options(shape_invariants=[(state, [tf.TensorShape([None, 16])] * 2)])
                output, state = cell(x[:, i], state)
                outputs = outputs.write(i, output)
            value = tf.reduce_mean(outputs.stack() ** 2)
        for weight, gradient in zip(cell.trainable_variables, tape.gradient(value, cell.trainable_variables)):
            weight.assign_sub(0.1 * gradient)
        return value

    return train, [tf.TensorSpec((None, 9, 12))]

def until_small():
    return (lambda x: tf.while_loop(lambda y: tf.reduce_sum(y) > 1.0, lambda y: y * 0.5, [x])), [tf.TensorSpec((4, 3))]

def broken():
    raise ValueError("two\\nlines")

def nothing():
    return 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "user_net.py").write_text(USER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(("name", "states"), [("model", 0), ("compiled", 2)])
def test_a_keras_model_is_trained_with_what_it_was_compiled_with(user: None, name: str, states: int) -> None:
    recording = record(trace(f"user_net:{name}", 6, "sgd"), load_device("t4"))
    weights = 4 * (3 * 3 * 3 * 4 + 4 + 144 * 10 + 10)
    assert recording.parameters * 4 == weights
    kept = sum(a.nbytes for a in recording.allocations if a.kind is TensorKind.OPTIMIZER_STATE)
    assert states * weights <= kept < states * weights + 64
    assert any(op.name == "Conv2DBackpropFilter" for op in recording.ops)


def test_a_step_of_ones_own_is_traced_with_the_functions_inside_it(user: None) -> None:
    graph = trace("user_net:step", 6, "sgd").pruned()  # the gradient of the input is not needed
    assert [op.type for op in graph.ops].count("MatMul") == 2
    recording = record(graph, load_device("t4"))
    assert recording.parameters == 35


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("user_net:until_small", UnsupportedError, "number of turns"),
        ("user_net:two_open", RequestError, "its other sizes"),
        ("user_net:broken", RequestError, "ValueError: two lines"),
        ("user_net:nothing", RequestError, "returned a int"),
        ("user_net:absent", RequestError, "function absent"),
        ("absent_net:x", RequestError, "cannot import absent_net"),
        ("user_net", RequestError, "names no function"),
    ],
)
def test_what_cannot_be_traced_is_told(user: None, target: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trace(target, 4, "sgd")


def nbytes(recording: Recording, kind: TensorKind) -> int:
    """Bytes of one of the iterations."""
    return sum(a.nbytes for a in recording.allocations if a.kind is kind) // len(recording.starts)


LSTM, GRU = 4 * 16 * (12 + 16 + 1), 2 * 3 * 8 * (12 + 8 + 2)
NETWORKS = {
    "lstm": LSTM + 4 * 16 * 33 + 170, "unrolled": LSTM + 4 * 16 * 33 + 170, "gru": GRU + 170, "simple": 16 * 29,
    "masked": 600 + LSTM, "images": 4 * 4 * (27 + 36 + 1) + 1450, "dropped": LSTM,
    "stacked": 4 * 8 * (12 + 8 + 1) + 3 * 8 * (8 + 8 + 2), "distributed": 52 + 4 * 6 * 11 + 14, "loop_by_hand": LSTM,
    "open_batch": 10240, "open_signature": 10240,
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_loops_whose_turns_follow_from_shapes_are_unrolled(user: None, name: str) -> None:
    recording = record(trace(f"user_net:{name}", 6, "sgd"), load_device("t4"))
    assert recording.parameters == NETWORKS[name]
    gradients = nbytes(recording, TensorKind.GRADIENT)
    # The rows of an embedding that were read have gradients alone; GRU's two biases have one that is taken apart.
    weights = 4 * NETWORKS[name] - (4 * (600 - 9 * 6 * 12) if name == "masked" else 0)
    assert gradients == weights if name != "gru" else weights <= gradients < 1.5 * weights


def test_a_loop_holds_what_the_unrolled_layers_hold(user: None) -> None:
    loop, unrolled = (record(trace(f"user_net:{name}", 64, "sgd"), load_device("t4")) for name in ("lstm", "unrolled"))
    one, other = (nbytes(each, TensorKind.ACTIVATION) for each in (loop, unrolled))
    # Each row that a loop reads or writes is copied out of the sequence or into it; unrolled ones are slices of it.
    rows = 4 * 64 * 9 * (12 + 16 + 16)
    assert 0.8 * other < one < other + 3 * rows


def test_a_batch_left_open_is_that_of_the_command(user: None) -> None:
    for batch in (6, 32):
        recording = record(trace("user_net:open_signature", batch, "sgd"), load_device("t4"))
        assert nbytes(recording, TensorKind.INPUT) == 4 * 1024 * batch
