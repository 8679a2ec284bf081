"""A test a row of the retarget table: what CUDA runs, and what memory that takes, as PyTorch's sources have it.

Attention, recurrent layers and scratch have files of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.fake_cuda.retargeting import HALF, TESTED, F, aten, cuda, live_after, names, row, run, taken
from torch import Tensor, nn

from overspill.capture.fake_cuda import attention, retarget
from overspill.core import Phase, TensorKind
from overspill.costs.scratch import Scratch, Software, scratch_bytes


def test_every_row_has_a_test() -> None:
    for name in ("attention", "recurrent", "scratch"):
        importlib.import_module(f"tests.capture.fake_cuda.test_retarget_{name}")  # which adds the rows of its tests
    rows = {*retarget.COMPOSITES, *retarget.FAKES, *retarget.SCRATCH}
    assert sorted(str(op) for op in rows - TESTED) == []
    assert sorted(str(op) for op in TESTED - rows) == []


@row(aten.dropout.default)
def test_dropout_keeps_a_mask_of_one_byte() -> None:
    recording = run(lambda: F.dropout(cuda(100, grad=True) * 1, 0.5).sum().backward())
    assert "native_dropout" in names(recording)
    assert "native_dropout_backward" in names(recording)

    def forward() -> Any:
        x = cuda(1000, dtype=HALF, grad=True)
        return x, F.dropout(x, 0.1)

    assert live_after(forward) == 2 * 1000 + 2 * 1000 + 1000
    assert names(run(lambda: F.dropout(cuda(10), 0.5, training=False)))[1:] == []
    assert names(run(lambda: F.dropout(cuda(10), 0.0)))[1:] == []
    everything = run(lambda: F.dropout(cuda(1000), 1.0))
    assert everything.peak_requested_bytes == 2 * 4000 + 4  # Dropout.cpp multiplies by a zero of no dimension


@row(aten.softmax.int, aten.log_softmax.int)
def test_softmax_of_float16_into_float32_makes_no_copy() -> None:
    for function in (F.softmax, F.log_softmax):
        x = lambda dtype: cuda(10, 100, dtype=dtype)  # noqa: E731
        half = run(lambda f=function, x=x: f(x(HALF), 1, dtype=torch.float32))
        assert "_to_copy" not in names(half)
        assert half.peak_requested_bytes == 1000 * (2 + 4)
        # SoftMax.cpp has the kernel for Half alone.
        brain = run(lambda f=function, x=x: f(x(torch.bfloat16), 1, dtype=torch.float32))
        assert "_to_copy" in names(brain)
        assert brain.peak_requested_bytes == 1000 * (2 + 4 + 4)


@row(aten.linear.default)
def test_a_linear_layers_bias_is_added_in_place_where_it_is_an_op_of_its_own() -> None:
    """Linear.cpp, `linear`: contiguous inputs take one op; others a product, whose result the bias is added to."""

    def ops(make: Callable[[], Tensor], **options: Any) -> list[str]:
        found = names(run(lambda: nn.Linear(16, 8, **options).cuda()(make())))
        return [name for name in found if name in {"mm", "addmm", "add", "add_", "bmm"}]

    assert ops(lambda: cuda(2, 3, 16)) == ops(lambda: cuda(2, 3, 5, 16)) == ops(lambda: cuda(16)) == ["addmm"]
    assert ops(lambda: cuda(3, 2, 16).transpose(0, 1)) == ["mm", "add_"]
    assert ops(lambda: cuda(2, 16, 3, 5).permute(0, 2, 3, 1)) == ["mm", "add_"]
    assert ops(lambda: cuda(3, 2, 16).transpose(0, 1), bias=False) == ["mm"]


@row(aten.rms_norm.default, aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)
def test_rms_norm_is_one_kernel_that_keeps_a_float_a_row() -> None:
    def forward() -> Any:
        x, norm = cuda(10, 64, dtype=HALF, grad=True), nn.RMSNorm(64, dtype=HALF, device="cuda")
        return x, norm, norm(x)

    assert live_after(forward) == 2 * (640 + 64 + 640) + 4 * 10
    recording = run(lambda: nn.RMSNorm(64).cuda()(cuda(10, 64, grad=True)).sum().backward())
    assert "_fused_rms_norm_backward" in names(recording)
    mixed = run(lambda: nn.RMSNorm(64).cuda()(cuda(10, 64, dtype=HALF)))
    assert "_fused_rms_norm" not in names(mixed)  # layer_norm.cpp: the weight has another dtype
    many = run(lambda: nn.RMSNorm(32).cuda()(cuda(70000, 32, grad=True)).sum().backward())
    assert taken(many)[-1] == 4 * 32 * -(-70000 // 32)


@row(aten.silu_backward.default, aten.mish_backward.default)
@pytest.mark.parametrize("name", ["silu", "mish"])
def test_the_gradient_of_an_activation_is_one_kernel(name: str) -> None:
    recording = run(lambda: getattr(F, name)(cuda(100, 100, grad=True)).sum().backward())
    made = names(recording, Phase.BACKWARD)
    assert [op for op in made if op not in {"ones_like", "detach"}] == [f"{name}_backward"]
    assert recording.peak_requested_bytes < 3.1 * 40_000  # input, output and gradient


@row(aten.gather_backward.default)
def test_the_gradient_of_gather_is_scattered_in_place() -> None:
    index = lambda: torch.zeros(10, 2, dtype=torch.int64, device="cuda")  # noqa: E731
    recording = run(lambda: cuda(10, 100, grad=True).gather(1, index()).sum().backward())
    assert names(recording, Phase.BACKWARD)[-2:] == ["new_zeros", "scatter_add_"]


@row(aten.value_selecting_reduction_backward.default)
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_gradient_of_a_maximum_is_scattered_in_place(keepdim: bool) -> None:
    def program() -> None:
        x = cuda(10, 100, grad=True)
        x.max(1, keepdim=keepdim).values.sum().backward()
        assert x.grad.shape == x.shape

    assert names(run(program), Phase.BACKWARD)[-2:] == ["new_zeros", "scatter_"]


@row(aten.ctc_loss.Tensor, aten._ctc_loss.default, aten._ctc_loss_backward.default)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_ctc_keeps_its_forward_variables_and_takes_as_much_in_backward(where: str) -> None:
    """LossCTC.cu: `log_alpha` is batch by steps by twice the longest target and one."""

    def program() -> None:
        scores = cuda(20, 2, 6, grad=True)
        lengths = torch.tensor([20, 18], device=where), torch.tensor([5, 4], device=where)
        targets = torch.ones(2, 5, dtype=torch.int64, device="cuda")
        F.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()
        assert scores.grad.shape == scores.shape

    recording = run(program)
    made = [a.nbytes for a in recording.allocations if a.name == "_ctc_loss"]
    assert sorted(made) == [2 * 4, 4 * 2 * 20 * 11]
    assert taken(recording) == [4 * 2 * 20 * 11]


@row(aten.histc.default, aten._grouped_mm.default)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_count_whole_numbers_and_multiply_groups_in_each_precision(dtype: torch.dtype) -> None:
    def program() -> None:
        x, weight = cuda(10, 8, dtype=dtype, grad=True), cuda(3, 8, 7, dtype=dtype).mT.contiguous().mT.requires_grad_()
        counts = torch.histc(torch.randint(3, (10,), device="cuda", dtype=torch.int32), bins=3, min=0, max=2)
        out = F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32))
        assert (out.shape, out.dtype, out.stride(0)) == ((10, 7), dtype, 8)
        out.sum().backward()
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)

    assert names(run(program)).count("_grouped_mm") == 3


@row(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)
def test_fused_optimizers_take_nothing_and_compute_nothing() -> None:
    def program() -> None:
        weight = nn.Parameter(cuda(100))
        weight.grad = cuda(100)
        for lr in (0.1, torch.tensor(0.1, device="cuda")):
            torch.optim.SGD([weight], lr=lr, momentum=0.9, fused=True).step()

    updates = [op for op in run(program).ops if op.name == "_fused_sgd_"]
    assert len(updates) == 2
    assert retarget.FAKES[aten._fused_adagrad_.default]() is None


def handles(program: Callable[[], Any]) -> list[tuple[Phase, tuple[int, ...]]]:
    kept = [a for a in run(program).allocations if a.scratch is not None and a.scratch.family == "gemm_handle"]
    assert all(a.kind is TensorKind.WORKSPACE for a in kept)
    return [(a.phase, a.scratch.sizes) for a in kept]


def test_each_thread_that_multiplies_matrices_has_one_handle() -> None:
    """CublasHandlePool.cpp: a workspace a handle, and a handle a thread; CUDA's backward is a thread of its own."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        for _ in range(2):
            model(cuda(4, 8)).sum().backward()

    assert handles(train) == [(Phase.FORWARD, (0,)), (Phase.BACKWARD, (1,))]
    assert handles(lambda: nn.Linear(8, 8).cuda()(cuda(4, 8))) == [(Phase.FORWARD, (0,))]
    assert handles(lambda: nn.Conv2d(3, 8, 3).cuda()(cuda(2, 3, 9, 9)).sum().backward()) == []


def test_an_update_that_multiplies_matrices_uses_the_programs_own_handle() -> None:
    def train() -> None:
        layer = nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.Adafactor(layer.parameters())
        layer(cuda(2, 3, 9, 9)).sum().backward()
        optimizer.step()

    assert handles(train) == [(Phase.UPDATE, (0,))]


def test_every_family_of_scratch_is_known_to_the_cost_model() -> None:
    sizes = {
        "conv_forward": (1,) * 11,
        "conv_backward_data": (1,) * 11,
        "conv_backward_weight": (1,) * 11,
        "sort": (8, 16),
    }
    for family in ("floats", "bytes", "gemm_handle", "lt_call", "lt_handle", *sizes):
        interval = scratch_bytes(Scratch(family, sizes.get(family, (3,)), "float32"), "8.0", Software())
        assert 0 <= interval.low <= interval.central <= interval.high
    with pytest.raises(ValueError, match="unknown scratch"):
        scratch_bytes(Scratch("other", (1,), ""), "8.0", Software())


def test_the_capability_is_that_of_the_recording() -> None:
    seen = []
    run(lambda: seen.append(attention.CAPABILITY.get()), (9, 0))
    assert seen == [(9, 0)]
    assert attention.CAPABILITY.get() is None
