"""TensorFlow's executor on graphs by hand: what shares memory, when it goes, and what convolutions take beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.capture.recording.recording import Allocation, Recording
from overspill.core import Phase, TensorKind
from overspill.devices import load_device
from overspill_papers.capture.tensorflow.executor import TRIAL, record
from overspill_papers.capture.tensorflow.graph import GraphOp, Made, Output, StepGraph, at_batch, load, save, stored

P40 = load_device("p40")
FLOATS = Made("float32", (4, 25))
NBYTES = 400


class Net:
    """Adds ops that make arrays of 100 floats."""

    def __init__(self) -> None:
        self.ops: list[GraphOp] = []

    def add(self, kind: str, *read: int, name: str = "", makes: tuple[Made, ...] = (FLOATS,), controls: tuple[int, ...] = (),
            **attrs: object) -> int:  # fmt: skip
        inputs = tuple(Output(op, 0) for op in read)
        self.ops.append(GraphOp(kind, name or f"{kind.lower()}{len(self.ops)}", inputs, controls, makes, attrs))
        return len(self.ops) - 1

    def recording(self, *fetches: int, trained: tuple[int, ...] = ()) -> Recording:
        return record(StepGraph(tuple(self.ops), fetches, frozenset(trained)), P40, iterations=1)


def names(recording: Recording) -> list[str]:
    return [allocation.name for allocation in recording.allocations]


def one(recording: Recording, name: str) -> Allocation:
    (found,) = [a for a in recording.allocations if a.name == name]
    return found


def test_an_op_writes_where_its_input_is_if_nothing_else_refers_to_it() -> None:
    net = Net()
    x = net.add("Placeholder", name="x")
    a = net.add("Relu", x, name="a")
    b = net.add("Tanh", a, name="b")
    assert names(net.recording(b)) == ["x"]
    net.add("Exp", a, name="c")
    assert names(net.recording(b, 3)) == ["x", "b"]  # the last reader may


def test_an_op_that_reads_one_thing_twice_cannot_write_there() -> None:
    net = Net()
    x = net.add("Placeholder", name="x")
    assert names(net.recording(net.add("Mul", x, x, name="square"))) == ["x", "square"]


def test_what_only_has_another_shape_is_no_copy_and_a_product_is_new() -> None:
    net = Net()
    x = net.add("Reshape", net.add("Placeholder", name="x"), name="flat")
    recording = net.recording(net.add("MatMul", x, name="product"))
    assert names(recording) == ["x", "product"]
    assert one(recording, "x").end == recording.events - 2


def test_a_buffer_goes_with_its_last_reader_and_a_result_that_nobody_reads_at_once() -> None:
    net = Net()
    x = net.add("Placeholder", name="x")
    unread = net.add("MatMul", x, name="unread")
    y = net.add("MatMul", x, name="y")
    last = net.add("MatMul", y, name="last", controls=(unread,))
    recording = net.recording(last)
    assert one(recording, "unread").end == one(recording, "unread").start + 1
    assert one(recording, "x").end < one(recording, "last").start
    assert one(recording, "y").end == one(recording, "last").end - 1


def test_variables_stay_and_updates_write_where_they_are() -> None:
    net = Net()
    weight = net.add("VariableV2", name="weight")
    read = net.add("Identity", weight, name="weight/read")
    gradient = net.add("MatMul", read, name="gradients/product")
    update = net.add("ApplyGradientDescent", weight, gradient, name="update")
    recording = net.recording(update, trained=(weight,))
    assert names(recording) == ["weight", "gradients/product"]
    assert one(recording, "weight").kind is TensorKind.PARAMETER
    assert one(recording, "weight").end == recording.events
    assert one(recording, "gradients/product").kind is TensorKind.GRADIENT
    assert [op.phase for op in recording.ops] == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    assert recording.parameters == 100


def test_what_the_optimizer_makes_of_a_gradient_is_no_gradient_and_needs_no_name() -> None:
    net = Net()
    weight = net.add("VarHandleOp", name="weight")
    product = net.add("MatMul", net.add("ReadVariableOp", weight), name="tape/gradients/product")
    gradient = net.add("Neg", product, name="gradient_tape/negated")
    scaled = net.add("MatMul", gradient, name="scaled")
    recording = net.recording(net.add("AssignSubVariableOp", weight, scaled, name="update"), trained=(weight,))
    # The gradient is where its product was; what is made of it comes after backward.
    kinds = {a.name: a.kind for a in recording.allocations}
    assert kinds == {
        "weight": TensorKind.PARAMETER,
        "tape/gradients/product": TensorKind.GRADIENT,
        "scaled": TensorKind.TEMPORARY,
    }
    assert [op.phase for op in recording.ops][-3:] == [Phase.BACKWARD, Phase.UPDATE, Phase.UPDATE]


def test_first_ready_runs_first() -> None:
    net = Net()
    x = net.add("Placeholder", name="x")
    a, b = net.add("MatMul", x, name="a"), net.add("MatMul", x, name="b")
    after_a, after_b = net.add("MatMul", a, name="after_a"), net.add("MatMul", b, name="after_b")
    recording = net.recording(net.add("AddN", after_a, after_b, name="sum"))
    assert names(recording) == ["x", "a", "b", "after_a", "after_b"]  # the sum is where its first summand was


def test_only_what_the_fetches_need_runs() -> None:
    net = Net()
    x = net.add("Placeholder", name="x")
    y = net.add("MatMul", x, name="y")
    net.add("MatMul", y, name="not needed")
    assert names(net.recording(y)) == ["x", "y"]


def convolution(kind: str, data_format: str) -> Recording:
    """One convolution of 3 x 3 on images of 8 channels, 16 x 16."""
    net = Net()
    shape = (2, 16, 16, 8) if data_format == "NHWC" else (2, 8, 16, 16)
    map_, filter_ = Made("float32", shape), Made("float32", (3, 3, 8, 8))
    x, y = (net.add("Placeholder", name=name, makes=(map_,)) for name in "xy")
    w = net.add("Placeholder", name="w", makes=(filter_,))
    read = {"Conv2D": (x, w), "Conv2DBackpropInput": (x, w, y), "Conv2DBackpropFilter": (x, w, y)}[kind]
    made = filter_ if kind.endswith("Filter") else map_
    op = net.add(kind, *read, name="conv", makes=(made,), data_format=data_format, padding="SAME", strides=[1, 1, 1, 1])
    return net.recording(op)


@pytest.mark.parametrize(
    ("kind", "data_format", "maps", "filters"),
    [
        ("Conv2D", "NCHW", 2, 1), ("Conv2D", "NHWC", 3, 1),
        ("Conv2DBackpropInput", "NCHW", 2, 1), ("Conv2DBackpropInput", "NHWC", 3, 1),
        ("Conv2DBackpropFilter", "NCHW", 0, 2), ("Conv2DBackpropFilter", "NHWC", 2, 2),
    ],
)  # fmt: skip
def test_a_convolution_turns_the_filter_its_result_and_last_channels(
    kind: str, data_format: str, maps: int, filters: int
) -> None:
    recording = convolution(kind, data_format)
    mine = [a.nbytes for a in recording.allocations if a.name == "conv" and a.scratch is None]
    assert mine.count(4 * 2 * 8 * 16 * 16) == maps
    assert mine.count(4 * 3 * 3 * 8 * 8) == filters
    assert len([a for a in recording.allocations if a.name == "conv" and a.end == recording.events - 1]) == 1


def test_algorithms_are_tried_once_for_a_shape_and_each_is_gone_before_the_next() -> None:
    net = Net()
    map_, filter_ = Made("float32", (64, 64, 56, 56)), Made("float32", (3, 3, 64, 64))
    x, w = net.add("Placeholder", name="x", makes=(map_,)), net.add("Placeholder", name="w", makes=(filter_,))
    for _ in range(2):
        x = net.add("Conv2D", x, w, makes=(map_,), data_format="NCHW", padding="SAME", strides=[1, 1, 1, 1])
    recording = net.recording(x)
    trials = [a for a in recording.allocations if a.scratch is not None]
    assert all(a.scratch is not None and a.scratch.family == TRIAL and a.end == a.start + 1 for a in trials)
    by_op = {name: len([a for a in trials if a.name == name]) for name in {a.name for a in trials}}
    assert by_op["conv2d2"] > by_op.get("conv2d3", 0)


def test_a_stored_graph_has_every_batch_size(tmp_path: Path) -> None:
    def graph(batch: int) -> StepGraph:
        net = Net()
        x = net.add("Placeholder", makes=(Made("float32", (batch, 5)),))
        return StepGraph(
            (*net.ops, GraphOp("Relu", "r", (Output(x, 0),), (), (Made("float32", (2 * batch + 1, 5)),))), (1,)
        )

    save(tmp_path / "g.json.gz", stored(graph(3), graph(5), (3, 5)))
    assert at_batch(load(tmp_path / "g.json.gz"), 64) == graph(64)
    with pytest.raises(ValueError, match="no line"):
        stored(graph(3), StepGraph((graph(4).ops), (1,)), (3, 5))
    with pytest.raises(ValueError, match="same ops"):
        stored(graph(3), StepGraph((graph(4).ops[0],), (0,)), (3, 5))
