"""The bindings that a step calls in place of ops: each the same overload, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import Lm, Pair
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.runtime.driver import DIRECT, OF_TENSORS, LoweredProgram

aten = torch.ops.aten
X, SQUARE = torch.randn(4, 6), torch.randn(6, 6)
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (X, [2, 12]), aten.t.default: (X,), aten.transpose.int: (X, 0, 1), aten.permute.default: (X, [1, 0]),
    aten.expand.default: (X, [3, 4, 6]), aten.unsqueeze.default: (X, 1), aten.squeeze.dim: (X[None], 0),
    aten.select.int: (X, 0, 1), aten.as_strided.default: (X, [2, 3], [6, 1], 3), aten.mm.default: (X, SQUARE),
    aten.addmm.default: (SQUARE[0], X, SQUARE), aten.bmm.default: (X[None], SQUARE[None]), aten.cat.default: ([X, X], 1),
    aten.sum.dim_IntList: (X, [0], True), aten.native_layer_norm.default: (X, [6], SQUARE[0], SQUARE[1], 1e-5),
    aten.native_dropout.default: (X, 0.5, True),
}  # fmt: skip
ARGUMENTS |= dict.fromkeys(OF_TENSORS, (X, X)) | dict.fromkeys(
    (aten.tanh.default, aten.relu.default, aten.clone.default), (X,)
)


class Seen(TorchDispatchMode):
    """Which ops are dispatched, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def bits(found: Any) -> list[bytes]:
    tensors = [found] if isinstance(found, Tensor) else list(found)
    return [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_a_binding_dispatches_the_op_that_it_stands_for(op: Any) -> None:
    seen = []
    for called in (op, DIRECT[op]):
        torch.manual_seed(0)
        with torch.no_grad(), Seen() as mode:
            found = called(*ARGUMENTS[op])
        ((func, args, kwargs),) = mode.calls
        seen.append((func, str(args), str(kwargs), bits(found)))
    assert seen[0] == seen[1]
    assert seen[0][0] is op


def test_numbers_are_left_to_the_op() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = [graph.call_function(aten.add.Tensor, (x, other)) for other in (x, 2)]
    graph.output(tuple(sums))
    program = LoweredProgram(fx.GraphModule({}, graph))
    assert [i.target for i in program.instructions] == [torch.add, aten.add.Tensor]


@pytest.mark.long
def test_a_step_calls_bindings_and_names_ops() -> None:
    pair = Pair(Lm)
    pair.train(1)
    ((compiled,),) = pair.step._plans._compiled.values()
    called = [i for i in compiled.program.instructions if i.node.target in DIRECT]
    assert called
    assert all(i.target is not i.node.target for i in called if i.node.target not in OF_TENSORS)
    pair.train(1)
    pair.assert_same()
