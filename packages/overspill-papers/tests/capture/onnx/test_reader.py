"""Models of ONNX as symbols; skipped without the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overspill.core import TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.devices import load_device
from overspill_papers.capture.mxnet.executor import record
from overspill_papers.capture.onnx.reader import LABEL, read

onnx: Any = pytest.importorskip("onnx")
P40 = load_device("p40")


def model(path: Path, nodes: list[Any], weights: dict[str, tuple[int, ...]], output: tuple[str, list[object]]) -> Path:
    """A file with one input `x` of images, whose batch is a name."""
    import numpy as np

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    initializers = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in weights.items()]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", kind, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info(output[0], kind, output[1])], initializers,
    )  # fmt: skip
    onnx.save(helper.make_model(graph), str(path))
    return path


@pytest.fixture
def net(tmp_path: Path) -> Path:
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], strides=[1, 1]), node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]), node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "v", "a"], ["y"], transB=1),
    ]  # fmt: skip
    weights = {"w": (16, 3, 3, 3), "b": (16,), "v": (10, 256), "a": (10,)}
    return model(tmp_path / "net.onnx", nodes, weights, ("y", ["batch", 10]))


def test_a_model_is_trained_as_mxnet_does(net: Path) -> None:
    symbol, inputs = read(net, 4, {}, trains=True)
    assert inputs == {"x": (4, 3, 8, 8)}
    recording = record(symbol, {**inputs, LABEL: (4,)}, P40)
    assert recording.parameters == 16 * 27 + 16 + 2560 + 10
    assert [op.name for op in recording.ops][:5] == [
        "Convolution",
        "Activation",
        "Pooling",
        "Reshape",
        "FullyConnected",
    ]


def test_inference_has_no_loss_and_no_gradients(net: Path) -> None:
    symbol, inputs = read(net, 4, {}, trains=False)
    recording = record(symbol, inputs, P40, optimizer=None)
    assert not any(a.kind is TensorKind.GRADIENT for a in recording.allocations)
    assert LABEL not in symbol.variables


def test_what_is_wrong_is_told(net: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'z'; .*x"):
        read(net, 4, {"z": (1,)}, trains=True)
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(RequestError, match="model of ONNX"):
        read(tmp_path / "bad.onnx", 4, {}, trains=True)
    with pytest.raises(RequestError, match="no such file"):
        read(tmp_path / "absent.onnx", 4, {}, trains=True)
    odd = model(tmp_path / "odd.onnx", [onnx.helper.make_node("Det", ["x"], ["y"])], {}, ("y", ["batch", 3]))
    with pytest.raises(UnsupportedError, match="operator Det"):
        read(odd, 4, {}, trains=True)
