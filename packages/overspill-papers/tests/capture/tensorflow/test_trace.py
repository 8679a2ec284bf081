"""Tracing with an installed TensorFlow; skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

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

def recurrent():
    return tf.keras.Sequential([tf.keras.layers.Input((4, 3)), tf.keras.layers.LSTM(2)])

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
        ("user_net:recurrent", UnsupportedError, "unroll"),
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
