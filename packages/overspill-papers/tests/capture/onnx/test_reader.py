"""Models of ONNX as symbols; skipped without the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overspill.core import TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.devices import load_device
from overspill_papers.capture.mxnet.backward import TRAINED
from overspill_papers.capture.mxnet.executor import record
from overspill_papers.capture.onnx.reader import LABEL, read

onnx: Any = pytest.importorskip("onnx")
P40 = load_device("p40")


def model(path: Path, nodes: list[Any], weights: dict[str, tuple[int, ...]], output: tuple[str, list[object]]) -> Path:
    """A file with one input `x` of images, whose batch is a name."""
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


LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
MILLIONS = {
    "resnet50": 25.557, "vgg19": 143.667, "densenet121": 8.063, "bvlc_alexnet": 60.965, "shufflenet": 1.393,
    "inception_v1": 6.999, "inception_v2": 11.215, "squeezenet": 1.235, "zfnet512": 87.251,
}  # fmt: skip


@pytest.mark.parametrize("name", MILLIONS)
def test_weights_left_out_as_shapes_and_one_value_are_weights(name: str) -> None:
    symbol, inputs = read(LIGHT / f"light_{name}.onnx", 1, {}, trains=True)
    recording = record(symbol, inputs | ({LABEL: (1,)} if LABEL in symbol.variables else {}), P40)
    assert round(recording.parameters / 1e6, 3) == MILLIONS[name]


def test_what_follows_from_shapes_alone_takes_no_op(tmp_path: Path) -> None:
    node, one = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [
        node("Constant", [], ["at"], value=one(np.array([0]))), node("Constant", [], ["rest"], value=one(np.array([-1]))),
        node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "at"], ["batch"]),
        node("Concat", ["batch", "rest"], ["flat"], axis=0), node("Reshape", ["x", "flat"], ["r"]),
        node("Cast", ["batch"], ["real"], to=1), node("Sqrt", ["real"], ["scale"]), node("Mul", ["r", "scale"], ["m"]),
        node("Transpose", ["v"], ["t"]), node("MatMul", ["m", "t"], ["y"]),
    ]  # fmt: skip
    symbol, _ = read(model(tmp_path / "n.onnx", nodes, {"v": (10, 192)}, ("y", ["batch", 10])), 4, {}, trains=False)
    assert [n.op for n in symbol.nodes if not n.is_variable] == [
        "Reshape",
        "broadcast_mul",
        "transpose",
        "FullyConnected",
    ]
    assert symbol.nodes[1].attrs == {"shape": "(4, 192)"}
    assert {n.name: n.attrs for n in symbol.nodes if n.is_variable}["scale"] == {"__shape__": "(1,)", TRAINED: "null"}


def test_masks_of_a_batch_that_is_known_are_values_and_not_weights(tmp_path: Path) -> None:
    node, one = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [
        node("Shape", ["x"], ["shape"]), node("Constant", [], ["minus"], value=one(np.array(-1))),
        node("Shape", ["shape"], ["rank"]), node("ConstantOfShape", ["rank"], ["ones"], value=one(np.array([1]))), node("Mul", ["ones", "minus"], ["unset"]),
        node("Equal", ["shape", "unset"], ["is_unset"]), node("Where", ["is_unset", "shape", "shape"], ["wanted"]),
        node("Constant", [], ["zero"], value=one(np.array(0.0, np.float32))), node("Expand", ["zero", "wanted"], ["mask"]),
        node("Add", ["x", "mask"], ["a"]), node("Mul", ["a", "w"], ["y"]),
    ]  # fmt: skip
    symbol, inputs = read(model(tmp_path / "n.onnx", nodes, {"w": (8,)}, ("y", ["batch", 3, 8, 8])), 4, {}, trains=True)
    ops = [n.op for n in symbol.nodes if not n.is_variable]
    assert ops == ["broadcast_add", "broadcast_mul", "mean", "MakeLoss"]
    recording = record(symbol, inputs, P40)
    assert recording.parameters == 8
    (mask,) = (a for a in recording.allocations if a.name == "mask")
    assert (mask.kind, mask.nbytes) == (TensorKind.BUFFER, 4 * 4 * 3 * 8 * 8)


@pytest.mark.parametrize(("size", "taken"), [(8, "Relu"), (6, "Tanh")])
def test_the_branch_of_a_known_condition_is_a_part_of_the_network(size: int, taken: str, tmp_path: Path) -> None:
    node, one = onnx.helper.make_node, onnx.numpy_helper.from_array
    value = onnx.helper.make_empty_tensor_value_info
    branches = {
        f"{name}_branch": onnx.helper.make_graph([node(op, ["x"], [op])], name, [], [value(op)])
        for name, op in (("then", "Relu"), ("else", "Tanh"))
    }
    nodes = [
        node("Shape", ["x"], ["shape"]), node("Constant", [], ["last"], value=one(np.array(3))),
        node("Gather", ["shape", "last"], ["width"]), node("Constant", [], ["eight"], value=one(np.array(8))),
        node("Equal", ["width", "eight"], ["is_eight"]), node("If", ["is_eight"], ["z"], **branches),
        node("Mul", ["z", "w"], ["y"]),
    ]  # fmt: skip
    path = model(tmp_path / "n.onnx", nodes, {"w": (1, 3, 1, 1)}, ("y", ["batch", 3, 8, size]))
    symbol, _ = read(path, 4, {"x": (4, 3, 8, size)}, trains=False)
    (activation,) = (n for n in symbol.nodes if n.op == "Activation")
    assert activation.attrs["act_type"] == taken.lower()
    nodes[4] = node("Greater", ["x", "x"], ["is_eight"])
    with pytest.raises(UnsupportedError, match="operator If"):
        read(model(path, nodes, {"w": (1, 3, 1, 1)}, ("y", ["batch", 3, 8, size])), 4, {}, trains=False)


def test_weights_may_be_constants_as_paddle_writes_them(tmp_path: Path) -> None:
    node = onnx.helper.make_node
    weight = onnx.numpy_helper.from_array(np.zeros((16, 3, 3, 3), np.float32))
    nodes = [
        node("Constant", [], ["w"], value=weight),
        node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2]),
    ]
    symbol, inputs = read(model(tmp_path / "n.onnx", nodes, {}, ("y", ["batch", 16, 4, 4])), 4, {}, trains=True)
    # SAME pads one side alone, in an operator of its own.
    assert [n.op for n in symbol.nodes if not n.is_variable][:2] == ["Pad", "Convolution"]
    assert record(symbol, inputs, P40).parameters == 16 * 27
