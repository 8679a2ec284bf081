"""While a step is traced its ops are those that eager runs; afterwards PyTorch is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from overspill.capture.compiled.batch_norm import CUDNN_BATCH_NORM, recomputes_without_statistics
from overspill.capture.compiled.graph import Captured, Surroundings, capture
from overspill.capture.compiled.kernels import RUN_AS, eager_kernels
from overspill.capture.compiled.trace import trace
from overspill.core import Instruction, Schedule, Verb
from overspill.runtime.lower import lower

aten = torch.ops.aten


class Function(nn.Module):
    """A parameter, a buffer, and a function of both."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape))
        self.register_buffer("mean", torch.zeros(shape[1]))
        self.register_buffer("variance", torch.ones(shape[1]))

    def forward(self) -> Tensor:
        return self.function(self.weight, self.mean, self.variance).float().sum()


def captured_of(module: nn.Module, batch: tuple[Tensor, ...]) -> Captured:
    found = trace(module, batch)
    return capture(found.joint, found.inputs, Surroundings())


def captured(function: Any, *shape: int) -> Captured:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return captured_of(Function(function, *shape), ())


def targets(found: Captured) -> set[Any]:
    return {node.target for node in found.joint.module.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [
        ("bilinear", aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
        ("bicubic", aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
        ("nearest", aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
        ("nearest-exact", aten._upsample_nearest_exact2d, aten._upsample_nearest_exact2d_backward),
    ],
)
def test_an_upsampling_is_one_op_in_forward_and_one_in_backward(mode: str, forward: Any, backward: Any) -> None:
    found = targets(captured(lambda w, *_: F.interpolate(w, scale_factor=2, mode=mode), 1, 2, 3, 3))
    assert {forward.vec, backward.default} <= found or {forward.default, backward.default} <= found


def test_a_recurrent_layer_is_one_op_in_each_direction_and_its_workspace_has_its_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].sum()

    with FakeTensorMode(allow_non_fake_inputs=True):
        found, again = (captured_of(Net(), (torch.zeros(5, 3, 6),)) for _ in range(2))
    assert found.graph.tensors == again.graph.tensors  # though PyTorch has results of ops in a cache then
    (node,) = found.joint.module.graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default)
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    real = [torch.zeros(a.shape) if isinstance(a, Tensor) else a for a in args]
    assert node.meta["val"][3].numel() == RUN_AS[node.target](*real)[3].numel() > 0


def test_the_python_kernels_are_back_when_a_trace_is_over() -> None:
    kernels = dict(aten.upsample_bilinear2d.vec.py_kernels)
    assert DispatchKey.Autograd in kernels
    with eager_kernels():
        assert DispatchKey.Autograd not in aten.upsample_bilinear2d.vec.py_kernels
        with eager_kernels():
            pass
        assert DispatchKey.Autograd not in aten.upsample_bilinear2d.vec.py_kernels
    assert kernels == aten.upsample_bilinear2d.vec.py_kernels


def cudnn(weight: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Batch norm as eager calls it where cuDNN is selected."""
    scale = torch.ones_like(mean)
    return torch.cudnn_batch_norm(weight, scale, torch.zeros_like(mean), mean, variance, True, 0.1, 1e-5)[0]


def test_batch_norm_by_cudnn_is_an_op_that_selects_cudnn_again_and_says_what_it_updates() -> None:
    found = captured(cudnn, 4, 3, 5, 5)
    assert {aten._batch_norm_with_update_functional.default, aten.batch_norm_backward.default} <= targets(found)
    assert aten._native_batch_norm_legit_functional.default not in targets(found)
    assert len(found.joint.write_backs) == 2, "its running statistics"


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_by_cudnn_has_its_gradient_where_it_updates_nothing(training: bool) -> None:
    def without_updates(weight: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        statistics = (None, None) if training else (mean, variance)
        scale = torch.ones_like(mean)
        return torch.cudnn_batch_norm(weight, scale, torch.zeros_like(mean), *statistics, training, 0.1, 1e-5)[0]

    backward = aten.cudnn_batch_norm_backward if training else aten.native_batch_norm_backward
    assert backward.default in targets(captured(without_updates, 4, 3, 5, 5))


def test_batch_norm_by_cudnn_is_recomputed_by_cudnn_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # no GPU here: what is asked is the device alone
        for place in ("capture.compiled.graph", "runtime.emitter"):
            patched.setattr(f"overspill.{place}.recomputes_without_statistics", lambda n: n.target is CUDNN_BATCH_NORM)
        found = captured(cudnn, 4, 3, 5, 5)
        (op,) = [op for op in found.graph.ops if op.name == "_batch_norm_with_update_functional"]
        assert len(op.recompute_writes) == 4
        run = [Instruction(Verb.RUN, op.id) for op in found.graph.ops]
        backward = next(i for i, o in enumerate(found.graph.ops) if o.phase is not found.graph.ops[0].phase)
        instructions = [
            *run[:backward],
            Instruction(Verb.FREE, op.recompute_writes[0]),
            Instruction(Verb.RECOMPUTE, op.id),
        ]
        _, back = lower(found, Schedule("by hand", (*instructions, *run[backward:])), 0)
    (again,) = back.module.graph.find_nodes(op="call_function", target=aten.cudnn_batch_norm.default)
    assert again.args[3:6] == (None, None, True)
    assert not any(recomputes_without_statistics(node) for node in found.nodes.values()), "on the CPU it cannot run"


GROUPED: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
    "rows by group": (torch.randn(10, 8), torch.randn(3, 8, 16), torch.tensor([2, 4, 10], dtype=torch.int32)),
    "rows of a width that is padded": (
        torch.randn(10, 8), torch.randn(3, 7, 8).mT, torch.tensor([2, 4, 10], dtype=torch.int32)
    ),
    "columns by group": (torch.randn(3, 9, 8), torch.randn(10, 8).t(), torch.tensor([2, 4, 10], dtype=torch.int32)),
    "sums by group": (torch.randn(10, 8).t(), torch.randn(10, 16), torch.tensor([2, 4, 10], dtype=torch.int32)),
    "a batch": (torch.randn(3, 10, 8), torch.randn(3, 7, 8).mT, None),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", GROUPED)
def test_products_of_groups_are_as_large_as_the_kernels_make_them(case: str, dtype: torch.dtype) -> None:
    a, b, offsets = GROUPED[case]
    real = torch.ops.aten._grouped_mm(a.to(dtype), b.to(dtype), offsets)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.aten._grouped_mm(*(mode.from_tensor(t.to(dtype)) for t in (a, b)), offsets)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
