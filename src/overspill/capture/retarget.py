"""What CUDA runs where a fake CPU tensor would take another path: the retarget table.

A program is traced with fake tensors on the CPU, since a torch without CUDA cannot trace gradients of CUDA tensors.
Most ops do the same to memory on both. This table has the others, as data:

- COMPOSITES: ops that torch composes differently by device (attention, dropout, recurrent layers, softmax that
  changes the dtype). Each is replaced, above autograd, by what CUDA composes.
- FAKES: ops that CUDA reaches through COMPOSITES and that torch has no fake implementation for.
- SCRATCH: ops whose CUDA kernels take memory besides their outputs.

Each row names its source; `tests/capture/test_retarget.py` has a test a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor

from overspill.costs.scratch import Scratch

aten = torch.ops.aten
_HALF = {torch.float16, torch.bfloat16}
# (major, minor) of the GPU that is captured for; attention kernels differ by it.
_CAPABILITY: ContextVar[tuple[int, int]] = ContextVar("capability", default=(8, 0))


# --- COMPOSITES -------------------------------------------------------------------------------------------------------


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """aten/src/ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`: CUDA fuses, with a mask of one byte."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if 0 < p < 1:
        return aten.native_dropout(x, p, True)[0]
    return x.mul(torch.zeros_like(x))


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """aten/src/ATen/native/SoftMax.cpp, `softmax`: half input with float output is one kernel on CUDA."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax(x, dim, True)
    return aten._softmax(x if dtype is None else x.to(dtype), dim, False)


def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """aten/src/ATen/native/SoftMax.cpp, `log_softmax`: as softmax."""
    if x.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax(x, dim, True)
    return aten._log_softmax(x if dtype is None else x.to(dtype), dim, False)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """aten/src/ATen/native/transformers/attention.cpp, `scaled_dot_product_attention`, on CUDA."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
    kernel = attention_kernel(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa)
    if kernel == "flash":
        width = query.shape[-1]
        if width % 8:
            query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
            scale = scale if scale is not None else width**-0.5
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if kernel == "efficient":
        if attn_mask is not None:
            attn_mask = _padded_mask(attn_mask, query, key)
        wants_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, wants_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, *, enable_gqa: bool = False
) -> str:
    """Which kernel CUDA chooses: `flash`, `efficient` or `math`; torch tries them in this order.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention`, `can_use_mem_efficient_attention`.
    """
    capability = _CAPABILITY.get()
    widths = {t.shape[-1] for t in (query, key, value)}
    dense = all(t.dim() == 4 and t.stride(-1) == 1 and 0 not in t.shape for t in (query, key, value))
    if not dense or dropout_p >= 1:
        return "math"
    if (
        query.dtype in _HALF and mask is None and len(widths) == 1 and max(widths) <= 256 and capability >= (8, 0)
        and torch.backends.cuda.flash_sdp_enabled()
    ):  # fmt: skip
        return "flash"
    alignment = 8 if query.dtype in _HALF else 4
    supported = query.dtype in {torch.float32, torch.float16} or (
        query.dtype is torch.bfloat16 and capability >= (8, 0)
    )
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    trains_mask = mask is not None and mask.requires_grad
    if (
        supported and capability >= (5, 0) and not any(w % alignment for w in widths)
        and same_heads and not (enable_gqa and not same_heads) and not trains_mask
        and torch.backends.cuda.mem_efficient_sdp_enabled()
    ):  # fmt: skip
        return "efficient"
    return "math"


def _padded_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """attention.cpp, `preprocess_mask`: the last dimension is padded to a multiple of 16 elements, then expanded."""
    width = mask.shape[-1]
    if width % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - width % 16))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _recurrent(mode: int, gates: int) -> Callable[..., Any]:
    """aten/src/ATen/native/cudnn/RNN.cpp: cuDNN runs all layers and steps of `mode` as one op with one reserve."""

    def run(  # noqa: PLR0913 - aten's own signature
        x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        return _cudnn(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first, ())

    def run_packed(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        sizes = tuple(int(size) for size in batch_sizes)
        return _cudnn(data, hx, params, has_biases, num_layers, dropout, train, bidirectional, False, sizes)

    def _cudnn(
        x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, batch_sizes: tuple[int, ...],
    ) -> Any:  # fmt: skip
        state, cell = (hx[0], hx[1]) if gates == 4 else (hx, None)
        width, projection = params[1].shape[0] // gates, 0
        if gates == 4 and state.shape[-1] != width:
            projection = state.shape[-1]
        per_layer = len(params) // (num_layers * (2 if bidirectional else 1))
        out, hy, cy, *_ = aten._cudnn_rnn(
            x, params, per_layer, None, state, cell, mode, width, projection, num_layers, batch_first, dropout,
            train, bidirectional, batch_sizes, None,
        )  # fmt: skip
        return (out, hy, cy) if gates == 4 else (out, hy)

    run.packed = run_packed  # type: ignore[attr-defined]
    return run


_LSTM, _GRU, _TANH, _RELU = _recurrent(2, 4), _recurrent(3, 3), _recurrent(1, 1), _recurrent(0, 1)

COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten.scaled_dot_product_attention.default: _attention,
    aten.lstm.input: _LSTM,
    aten.lstm.data: _LSTM.packed,  # type: ignore[attr-defined]
    aten.gru.input: _GRU,
    aten.gru.data: _GRU.packed,  # type: ignore[attr-defined]
    aten.rnn_tanh.input: _TANH,
    aten.rnn_tanh.data: _TANH.packed,  # type: ignore[attr-defined]
    aten.rnn_relu.input: _RELU,
    aten.rnn_relu.data: _RELU.packed,  # type: ignore[attr-defined]
}


@contextmanager
def retargeted(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, composite ops on CPU tensors compose as they do on a GPU of this compute capability."""
    token = _CAPABILITY.set(capability)
    library = torch.library.Library("aten", "IMPL")
    try:
        for op, composed in COMPOSITES.items():
            library.impl(op, composed, "AutogradCPU")
        yield
    finally:
        library._destroy()
        _CAPABILITY.reset(token)


# --- FAKES ------------------------------------------------------------------------------------------------------------


def _cudnn_rnn(
    x: Tensor, weight: Any, weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Any, dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output, last states and the reserve in which cuDNN keeps gates and cells for backward.

    The reserve holds, a layer, direction, step and sequence, the gates, the cell and the hidden state, which is what
    backward reads (Appleyard et al., arXiv 1604.01946, equations 1 to 6); cuDNN does not publish its layout.
    """
    directions = 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    steps = x.shape[0] if batch_sizes else x.shape[0] * x.shape[1]
    gates = {2: 4, 3: 3}.get(mode, 1)
    kept = gates + (2 if mode == 2 else 1)
    reserve = steps * num_layers * directions * hidden_size * kept * x.element_size() if train else 0
    cy = x.new_empty((0,)) if cx is None else cx.new_empty(cx.shape)
    return (
        x.new_empty((*x.shape[:-1], width)), hx.new_empty(hx.shape), cy, x.new_empty((reserve,), dtype=torch.uint8),
        x.new_empty((0,)),
    )  # fmt: skip


def _cudnn_rnn_backward(
    x: Tensor, weight: Any, weight_stride0: int, weight_buf: Any, hx: Tensor, cx: Tensor | None, output: Tensor,
    *rest: Any, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of input, states and weights (RNN.cpp, `_cudnn_rnn_backward`)."""
    d_cx = None if cx is None else cx.new_empty(cx.shape)
    return x.new_empty(x.shape), hx.new_empty(hx.shape), d_cx, [w.new_empty(w.shape) for w in weight]


FAKES: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
}


# --- SCRATCH ----------------------------------------------------------------------------------------------------------

Wanted = list[tuple[int, Scratch]]  # after which output it is taken and given back


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _channels_last(x: Tensor) -> bool:
    return (
        x.dim() in {4, 5}
        and x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        and not x.is_contiguous()
    )


def _conv_sizes(x: Tensor, w: Tensor, y: Tensor, stride: Any, groups: int, transposed: bool) -> tuple[int, ...]:
    """What `costs.scratch` wants to know of a convolution, in the order of its `Convolution`."""
    if transposed:
        x, y = y, x
    channels_in = x.shape[1]
    return (
        x.numel(), w.numel(), y.numel(), x.shape[0], channels_in, y.shape[1], groups, prod(w.shape[2:]),
        max(stride, default=1), int(_channels_last(x) or _channels_last(w)), len(w.shape) - 2,
    )  # fmt: skip


def _convolution(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """aten/src/ATen/native/cudnn/Conv_v8.cpp, `run_conv_plan`: a workspace for the time of the call."""
    x, w, _, stride, _, _, transposed, _, groups = args
    family = "conv_backward_data" if transposed else "conv_forward"
    return [(0, Scratch(family, _conv_sizes(x, w, result, stride, groups, transposed), _name(x.dtype)))]


def _convolution_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """As forward; the gradient of the input first, then that of the weight, each with its own workspace."""
    dy, x, w, _, stride, _, _, transposed, _, groups, mask = args
    sizes = _conv_sizes(x, w, dy, stride, groups, transposed)
    families = ("conv_forward" if transposed else "conv_backward_data", "conv_backward_weight")
    return [
        (position, Scratch(family, sizes, _name(x.dtype)))
        for position, family in zip((0, int(mask[0])), families, strict=True)
        if mask[position if family != "conv_backward_weight" else 1]
    ]


def _efficient_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """transformers/cuda/attention_backward.cu, `_efficient_attention_backward`: row sums `delta`, and float
    accumulators for the gradients of half-precision inputs."""
    query, key, value = args[1:4]
    rows = prod(query.shape[:-1])
    accumulators = 0 if query.dtype is torch.float32 else query.numel() + key.numel() + value.numel()
    return [(2, Scratch("floats", (rows + accumulators,), "float32"))]


def _flash_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `softmax_d` and the float accumulator of dq, both with
    rows rounded up to 128 and the head to 32; expanded dk and dv where heads are shared."""
    query, key, value = args[1:4]
    batch, heads, rows, width = query.shape
    rows, width = -(-rows // 128) * 128, -(-width // 32) * 32
    return [(2, Scratch("floats", (batch * heads * rows * (width + 1),), "float32"))]


def _embedding_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu: above 3072 indices they are sorted, and
    partial sums of runs of equal indices are kept in float."""
    grad, indices = args[0], args[1]
    if indices.numel() <= 3072:
        return []
    return [(0, Scratch("embedding_backward", (indices.numel(), grad.shape[-1], result.shape[0]), _name(grad.dtype)))]


def _sorting(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Sort.cpp, cub::DeviceRadixSort: keys and positions once more."""
    x = args[0]
    return [(9, Scratch("sort", (x.numel(), x.element_size()), _name(x.dtype)))]


def _index_put(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`: linear indices, sorted with positions."""
    indices = [i for i in args[1] if isinstance(i, Tensor)]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate or not indices:
        return []
    return [(9, Scratch("sort", (max(i.numel() for i in indices), 8), "int64"))]


def _layer_norm_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/layer_norm_kernel.cu: partial sums of the weight's gradient over 32 row blocks."""
    x, shape = args[1], args[2]
    width = prod(shape)
    if x.numel() // max(width, 1) <= 128:
        return []
    return [(9, Scratch("floats", (2 * 32 * width,), "float32"))]


def _group_norm(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/group_norm_kernel.cu: a scale and a shift a sample and channel, in float."""
    x = args[0] if not isinstance(args[1], Tensor) or args[1].dim() <= 1 else args[1]
    return [(9, Scratch("floats", (2 * x.shape[0] * x.shape[1],), "float32"))] if x.dim() > 1 else []


SCRATCH: dict[Any, Callable[[Any, Any, Any], Wanted]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.sort.default: _sorting,
    aten.sort.stable: _sorting,
    aten.topk.default: _sorting,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm,
}
