"""Lists of tensors, without TensorFlow: which outputs their elements are, and what is copied."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overspill.core.errors import UnsupportedError
from overspill_papers.capture.tensorflow.graph import Made, Output
from overspill_papers.capture.tensorflow.lists import ListOps, TensorList

ROW = Made("float32", (4, 16))


class Graph:
    """Ops by their outputs, and the numbers that are known."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, tuple[Output, ...], tuple[Made, ...]]] = []
        self.values: dict[Output, Any] = {}
        self.lists = ListOps(self.append, lambda output: self.ops[output.op][2][output.number], self.values)

    def append(self, kind: str, read: Sequence[Output], made: Sequence[Made]) -> list[Output]:
        self.ops.append((kind, tuple(read), tuple(made)))
        return [Output(len(self.ops) - 1, i) for i in range(len(made))]

    def number(self, value: int) -> Output:
        (output,) = self.append("Const", (), [Made("int32", ())])
        self.values[output] = np.int32(value)
        return output

    def run(self, kind: str, *read: Output | TensorList) -> Any:
        shape = SimpleNamespace(as_list=lambda: list(ROW.shape))
        op = SimpleNamespace(
            type=kind, name="op", outputs=[SimpleNamespace(dtype=SimpleNamespace(name="float32"), shape=shape)]
        )
        return self.lists.run(op, read)


def test_what_is_set_or_pushed_is_what_is_read_and_popped() -> None:
    net = Graph()
    a, b = net.append("MatMul", (), [ROW, ROW])
    (held,) = net.run("TensorListReserve", net.number(2), net.number(3))
    (held,) = net.run("TensorListSetItem", held, net.number(1), a)
    assert net.run("TensorListGetItem", held, net.number(1)) == [a]
    (held,) = net.run("TensorListPushBack", held, b)
    rest, last = net.run("TensorListPopBack", held)
    assert (rest, last) == (TensorList((None, a, None)), b)
    assert [kind for kind, *_ in net.ops if kind != "Const"] == ["MatMul"]  # references alone
    # What was never set is zeros, which are made.
    (zeros,) = net.run("TensorListGetItem", held, net.number(0))
    assert net.ops[zeros.op] == ("ZerosLike", (), (ROW,))


def test_rows_of_a_tensor_and_the_join_of_a_list_are_copies() -> None:
    net = Graph()
    (whole,) = net.append("MatMul", (), [Made("float32", (3, 4, 16))])
    (rows,) = net.run("TensorListFromTensor", whole)
    assert net.ops[rows.elements[0].op] == ("TensorListFromTensor", (whole,), (ROW,) * 3)
    (joined,) = net.run("TensorListStack", rows)
    assert net.ops[joined.op] == ("TensorListStack", rows.elements, (Made("float32", (3, 4, 16)),))
    (length,) = net.run("TensorListLength", rows)
    (shape,) = net.run("TensorListElementShape", rows)
    assert (net.values[length], tuple(net.values[shape])) == (3, (4, 16))
    # Gradients of lists are added element by element, where both have one.
    (total,) = net.run("AddN", rows, TensorList((None, rows.elements[0], None)))
    assert [element == row for element, row in zip(total.elements, rows.elements, strict=True)] == [True, False, True]


def test_an_index_of_data_is_refused() -> None:
    net = Graph()
    (index,) = net.append("ArgMax", (), [Made("int32", ())])
    with pytest.raises(UnsupportedError, match="index"):
        net.run("TensorListGetItem", TensorList((index,)), index)
    with pytest.raises(UnsupportedError, match="not known here"):
        net.run("TensorListScatterV2", TensorList())
