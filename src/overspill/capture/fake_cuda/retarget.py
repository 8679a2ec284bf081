# ruff: noqa: ARG001 - the signatures are those of ops, and of what a dispatched op has
"""The retarget table: CUDA's ops where fake CPU tensors would run others.

A program is traced with fake tensors on the CPU, because a torch without CUDA cannot trace gradients of CUDA tensors.
Most ops do the same to memory on both. This table has the others, as data:

- COMPOSITES: ops that torch composes differently by device (attention, dropout, recurrent layers, softmax that
  changes the dtype), or differently for tensor subclasses, such as fake tensors. Each is replaced, above autograd,
  by the ops that CUDA composes of plain tensors.
- FAKES: ops that CUDA reaches through COMPOSITES, or that torch has no fake implementation for.
- SCRATCH: ops whose CUDA kernels take memory besides their outputs.

Each row names its source; `tests/capture/fake_cuda/test_retarget*.py` have a test a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from overspill.pytorch.dispatch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    call_kernel,
    close_library,
    forget_dispatch,
)
from overspill.pytorch.fake_tensors import FakeTensor, FunctionalTensor
from overspill.pytorch.schemas import Arguments

from . import attention, recurrent, workspaces
from .attention import CAPABILITY
from .workspaces import Wanted, of_bytes

aten = torch.ops.aten


def composed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op by its C++ composition, not a Python decomposition."""
    return call_kernel(op, DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# --- COMPOSITES -------------------------------------------------------------------------------------------------------


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Run dropout, fused with a one-byte mask (aten/src/ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`)."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if 0 < p < 1:
        return aten.native_dropout(x, p, True)[0]
    return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run softmax; half input with float output is one kernel on CUDA (aten/src/ATen/native/SoftMax.cpp)."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax(x, dim, True)
    return aten._softmax(x if dtype is None else x.to(dtype), dim, False)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Run log-softmax in the same way as softmax (aten/src/ATen/native/SoftMax.cpp)."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax(x, dim, True)
    return aten._log_softmax(x if dtype is None else x.to(dtype), dim, False)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Run RMS norm, one kernel except for some dtypes and layouts (aten/src/ATen/native/layer_norm.cpp)."""
    other_layout = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    if other_layout or x.is_complex() or (weight is not None and weight.dtype is not x.dtype):
        return composed(aten.rms_norm.default, x, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(x, list(normalized_shape), weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """Fused RMS norm with torch's own derivative, which on the CPU is decomposed instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        """Return the op's output; save its input and its second output, a float a row."""
        with AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return gradients of the input and the weight."""
        x, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        d_x, d_weight = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, mask)
        return d_x, None, d_weight, None


def _one_kernel(op: Any) -> Callable[..., Tensor]:
    """Return a derivative that is one kernel on CUDA but composed for fakes (native_functions.yaml)."""

    def run(*args: Any) -> Tensor:
        with AutoDispatchBelowAutograd():
            made: Tensor = op(*args)
        return made

    return run


def _gather_backward(grad: Tensor, x: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    """Return the gradient of `gather`, in place on zeros (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    return grad.new_zeros(x.shape).scatter_add_(dim, index, grad)


def _selected_backward(grad: Tensor, dim: int, indices: Tensor, sizes: Any, keepdim: bool) -> Tensor:
    """Return the gradient of `max(dim)` and the like, in place on zeros (aten/src/ATen/native/ReduceOps.cpp)."""
    if not keepdim and len(sizes) > 0:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices, grad)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Run CTC loss with lengths on the host (aten/src/ATen/native/LossCTC.cpp); unknown ones are the longest."""
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = (log_probs.shape[0], targets.shape[-1] if targets.dim() > 1 else targets.shape[0] // batch)
    known = [
        [most] * batch if isinstance(lengths, FakeTensor) else lengths.reshape(-1).tolist()
        for lengths, most in zip((input_lengths, target_lengths), longest, strict=True)
    ]
    return aten.ctc_loss.IntList(log_probs, targets, *known, blank, reduction, zero_infinity)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a linear layer, with the bias added in place if it is not fused (aten/src/ATen/native/Linear.cpp)."""
    if x.dim() <= 2 or x.is_contiguous():
        return composed(aten.linear.default, x, weight, bias)
    if torch.is_inference_mode_enabled() and weight.requires_grad:
        # LinearAlgebra.cpp, `should_fold`: as for weights that require gradients, which fake views do not know here.
        out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    else:
        out = torch.matmul(x, weight.t())
    return out if bias is None else out.add_(bias)


COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.linear.default: _linear,
    aten.dropout.default: _dropout,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten.scaled_dot_product_attention.default: attention.attention,
    aten._scaled_dot_product_attention_math.default: attention.math_attention,
    aten.lstm.input: recurrent.LSTM[0],
    aten.lstm.data: recurrent.LSTM[1],
    aten.gru.input: recurrent.GRU[0],
    aten.gru.data: recurrent.GRU[1],
    aten.rnn_tanh.input: recurrent.TANH[0],
    aten.rnn_tanh.data: recurrent.TANH[1],
    aten.rnn_relu.input: recurrent.RELU[0],
    aten.rnn_relu.data: recurrent.RELU[1],
    aten._pad_packed_sequence.default: recurrent.pad,
    aten.lstm_cell.default: recurrent.lstm_cell,
    aten.gru_cell.default: recurrent.gru_cell,
    aten.rms_norm.default: _rms_norm,
    aten.gather_backward.default: _gather_backward,
    aten.value_selecting_reduction_backward.default: _selected_backward,
    aten.ctc_loss.Tensor: _ctc_loss,
    aten.silu_backward.default: _one_kernel(aten.silu_backward.default),
    aten.mish_backward.default: _one_kernel(aten.mish_backward.default),
}


GRAPHED = (aten.dropout.default, aten.scaled_dot_product_attention.default)
"""Those of COMPOSITES used in a compiler's trace; CUDA's forms of the others cannot be traced, or gain nothing."""


@contextmanager
def retargeted(capability: tuple[int, int], ops: Iterable[Any] = tuple(COMPOSITES)) -> Iterator[None]:
    """Compose `ops` on fake CPU tensors as on a GPU, inside the block."""
    token, tried = CAPABILITY.set(capability), workspaces.TRIED.set(set())
    library = torch.library.Library("aten", "IMPL")
    chosen = tuple(ops)
    try:
        for op in chosen:
            library.impl(op, _for_fakes(op, COMPOSITES[op]), "AutogradCPU")
            forget_dispatch(op)  # tracers dispatch in Python, and remember where an op went
        yield
    finally:
        close_library(library)
        for op in chosen:
            forget_dispatch(op)
        CAPABILITY.reset(token)
        workspaces.TRIED.reset(tried)


def _for_fakes(op: Any, row: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `row` to apply to fake tensors; real ones compose as usual."""

    @wraps(row)
    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, Tensor) and not isinstance(first, (FakeTensor, FunctionalTensor)):
            return composed(op, first, *args, **kwargs)
        return row(first, *args, **kwargs)

    return run


# --- FAKES ------------------------------------------------------------------------------------------------------------


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return output and a float a row.

    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`.
    """
    kept = x.shape[: x.dim() - len(shape)] + (1,) * len(shape)
    accurate = torch.float32 if x.dtype in attention.HALF else x.dtype
    return x.new_empty(x.shape), x.new_empty(kept, dtype=accurate)


def _fused_rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, mask: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients of input and weight (layer_norm_kernel.cu, `_fused_rms_norm_backward_cuda`)."""
    d_weight = weight.new_empty(weight.shape) if mask[1] and weight is not None else None
    return x.new_empty(x.shape) if mask[0] else None, d_weight


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Return losses and all forward variables (aten/src/ATen/native/cuda/LossCTC.cu, `ctc_loss_gpu_template`)."""
    batch = log_probs.shape[1]
    alpha = (batch, log_probs.shape[0], 2 * max(target_lengths, default=0) + 1)
    return log_probs.new_empty((batch,)), log_probs.new_empty(alpha)


def _ctc_backward(grad: Tensor, log_probs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the gradient (LossCTC.cu, `ctc_loss_backward_gpu_template`); backward variables are in SCRATCH."""
    return log_probs.new_empty(log_probs.shape)


def _histc(x: Tensor, bins: int = 100, *_: Any) -> Tensor:
    """Return counts, of whole numbers too (aten/src/ATen/native/cuda/SummaryOps.cu, `_histc_cuda_template`)."""
    return x.new_empty((bins,))


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return products of groups in rows padded to 16 bytes (aten/src/ATen/native/GroupedMMUtils.h).

    torch's fake implementation takes bfloat16 alone.
    """
    dtype = a.dtype if out_dtype is None else out_dtype
    # Groups are along the sum (two matrices), along rows of a stack, or along columns.
    if a.dim() == b.dim() == 2:
        assert offs is not None
        leading = [offs.shape[0], a.shape[0]]
    else:
        leading = [*a.shape[:-1]] if b.dim() == 3 else [a.shape[1]]
    width = 16 // dtype.itemsize
    padded = -(-b.shape[-1] // width) * width
    strides = [leading[-1] * padded, padded, 1][-len(leading) - 1 :]
    return a.new_empty_strided((*leading, b.shape[-1]), strides, dtype=dtype)


def _in_place(*_: Any, **__: Any) -> None:
    """Run an in-place optimizer step, which has no output.

    aten/src/ATen/native/cuda/FusedSgdKernel.cu, FusedAdagradKernel.cu.
    """


def _like_its_input(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient alone (aten/src/ATen/native/cuda/ActivationSiluKernel.cu, ActivationMishKernel.cu)."""
    return torch.empty_like(x)


FAKES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: recurrent.cudnn_rnn,
    aten._cudnn_rnn_backward.default: recurrent.cudnn_rnn_backward,
    aten._thnn_fused_lstm_cell.default: recurrent.fused_lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: recurrent.fused_lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: recurrent.fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: recurrent.fused_gru_cell_backward,
    aten._pack_padded_sequence.default: recurrent.pack,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss_backward.default: _ctc_backward,
    aten.histc.default: _histc,
    aten._grouped_mm.default: grouped_mm,
    aten.silu_backward.default: _like_its_input,
    aten.mish_backward.default: _like_its_input,
    aten._fused_sgd_.default: _in_place,
    aten._fused_sgd_.tensor_lr: _in_place,
    aten._fused_adagrad_.default: _in_place,
    aten._fused_adagrad_.tensor_lr: _in_place,
}


# --- SCRATCH ----------------------------------------------------------------------------------------------------------


def _ctc_betas(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of CTC loss's backward: its backward variables, as large as `log_alpha`.

    LossCTC.cu, `ctc_loss_backward_gpu_template`.
    """
    log_alpha = given["log_alpha"]
    return of_bytes(1, log_alpha.numel() * log_alpha.element_size())


SCRATCH: dict[Any, Callable[[Arguments, Any], Wanted]] = {
    aten.convolution.default: workspaces.convolution,
    aten.convolution_backward.default: workspaces.convolution_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: attention.efficient_backward,
    aten._scaled_dot_product_flash_attention_backward.default: attention.flash_backward,
    aten._safe_softmax.default: attention.safe_softmax,
    aten._native_multi_head_attention.default: attention.fast_attention,
    aten._transformer_encoder_layer_fwd.default: attention.fast_encoder_layer,
    aten.embedding_dense_backward.default: workspaces.embedding_backward,
    aten._embedding_bag_backward.default: workspaces.embedding_bag_backward,
    aten.sort.default: workspaces.sort,
    aten.sort.stable: workspaces.sort,
    aten.topk.default: workspaces.topk,
    aten.index_put_.default: workspaces.index_put,
    aten.index_put.default: workspaces.index_put,
    aten._index_put_impl_.default: workspaces.index_put,
    aten.native_layer_norm_backward.default: workspaces.layer_norm_backward,
    aten._fused_rms_norm_backward.default: workspaces.rms_norm_backward,
    aten.native_group_norm.default: workspaces.group_norm,
    aten.native_group_norm_backward.default: workspaces.group_norm_backward,
    aten.mse_loss.default: workspaces.reduced_loss,
    aten.smooth_l1_loss.default: workspaces.reduced_loss,
    aten.huber_loss.default: workspaces.reduced_loss,
    aten.binary_cross_entropy.default: workspaces.reduced_loss,
    aten.binary_cross_entropy_with_logits.default: workspaces.loss_with_logits,
    aten.sum.dim_IntList: workspaces.reduction,
    aten.sum.default: workspaces.reduction,
    aten.mean.dim: workspaces.reduction,
    aten.mean.default: workspaces.reduction,
    aten.logsumexp.default: workspaces.logsumexp,
    aten._ctc_loss_backward.default: _ctc_betas,
    aten._foreach_norm.Scalar: workspaces.foreach_norm,
}
