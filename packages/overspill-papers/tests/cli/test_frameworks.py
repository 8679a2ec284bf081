"""Jobs of other frameworks: what the user names, and the estimate of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.core.errors import RequestError
from overspill.core.text import pip_install
from overspill.job.source import Source, shapes_of
from overspill_papers.papers.symbols import resnet50

FILE = "--mxnet net.json --input data=N,3,64,64 --input softmax_label=N"


@pytest.fixture
def symbol(overspill: Overspill) -> None:
    Path("net.json").write_text(resnet50().to_json(), encoding="utf-8")


def test_a_symbol_is_estimated_as_mxnet_trains_it(symbol: None, overspill: Overspill) -> None:
    done = overspill(f"estimate {FILE} --batch 16 --gpu p40 --optimizer momentum --json")
    answer = done.answer
    assert done.code == 0
    assert (answer["model"], answer["allocator"], answer["dtype"]) == ("net.json", "mxnet", "float32")
    assert answer["breakdown"]["weights"] == answer["breakdown"]["optimizer_state"] > 4 * 25_000_000
    assert answer["largest_batch"] > 512
    assert sum(answer["breakdown"].values()) == answer["total_bytes"]
    forward = overspill(f"estimate {FILE} --batch 16 --inference --json").answer
    assert forward["breakdown"]["weight_gradients"] == 0
    assert forward["total_bytes"] < answer["total_bytes"]


@pytest.mark.long
def test_what_does_not_fit_is_not_told_to_use_pytorch(symbol: None, overspill: Overspill) -> None:
    done = overspill(f"estimate {FILE} --batch 4096 --gpu t4")
    assert done.code == 1
    assert "accumulating gradients" in done.out
    assert "overspill.compile" not in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mxnet net.json --batch 4", "its variables: data, conv0_weight"),
        ("--mxnet net.json --input data=N,3,64,64", "say how many samples"),
        (f"{FILE} --batch 4 --dtype float16", "--dtype: for a model of PyTorch's"),
        (f"resnet18 {FILE} --batch 4", "is a job of its own"),
        (f"{FILE} --batch 4 --gpus 2", "--parallel: for a model of PyTorch's"),
        (f"{FILE} --batch 4 --onnx net.json", "one job at a time, not --mxnet and --onnx"),
        (f"{FILE} --batch 4 --optimizer adafactor", "MXNet's adafactor is not known"),
        ("resnet18 --batch 4 --input data=N,3", "--input is for --mxnet and --onnx"),
        ("--mxnet net.json --batch 4 --input data=N,x", "--input data=N,x is not a shape"),
        ("--mxnet absent.json --batch 4 --input data=N,3", "cannot read absent.json"),
    ],
)
def test_mistakes_are_one_line(symbol: None, overspill: Overspill, arguments: str, words: str) -> None:
    done = overspill(f"estimate {arguments}")
    assert done.code == 2
    assert words in done.error


def test_a_shape_has_the_batch_where_it_says_so() -> None:
    assert shapes_of(["a=N,3", "b=5,N"], 7) == {"a": (7, 3), "b": (5, 7)}
    for text in ("a", "=3", "a=", "a=3,,4", "a=0,N", "a=-1"):
        with pytest.raises(RequestError, match="--input"):
            shapes_of([text], 7)
    assert Source.of({"mxnet": None, "onnx": None}, ()) is None


def test_without_the_package_the_extra_is_named(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("tensorflow", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("model.onnx").touch()
    assert pip_install("onnx") in overspill("estimate --onnx model.onnx --batch 4").error
    assert pip_install("tensorflow") in overspill("estimate --tensorflow a:b --batch 4").error


def test_a_keras_model_is_estimated_as_tensorflow_trains_it(overspill: Overspill) -> None:
    pytest.importorskip("tensorflow")
    Path("keras_net.py").write_text(
        "import tensorflow as tf\n"
        "def model():\n"
        "    layers = tf.keras.layers\n"
        "    return tf.keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(9)])\n",
        encoding="utf-8",
    )
    answer = overspill("estimate --tensorflow keras_net:model --batch 32 --gpu t4 --json").answer
    assert answer["allocator"] == "tensorflow"
    assert answer["fits"] is True
    assert answer["largest_batch"] > 32
