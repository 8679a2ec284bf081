# ruff: noqa: ARG001 - the signatures are those of ops, and of what a dispatched op has
"""Attention on CUDA: choice of kernel, its inputs, and its scratch."""

from __future__ import annotations

from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor

from overspill.costs.scratch import Scratch
from overspill.pytorch.schemas import Arguments

from .workspaces import LAST, Wanted, of_bytes

aten = torch.ops.aten
HALF = {torch.float16, torch.bfloat16}
CAPABILITY: ContextVar[tuple[int, int] | None] = ContextVar("capability", default=None)
"""(major, minor) of the GPU for which ops are captured; None if they run where they are captured."""
USUAL = (8, 0)
"""The GPU whose attention kernels are assumed if none is named."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run scaled dot product attention as on CUDA (aten/src/ATen/native/transformers/attention.cpp)."""
    kernel = attention_kernel(query, key, value, attn_mask, dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, _minus_infinity(query))
    # Flash attention pads heads to multiples of 8; the efficient kernel pads the mask.
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
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, _trains(query, key, value), dropout_p, is_causal, scale=scale
        )[0]
    return math_attention(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[
        0
    ]


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _minus_infinity(like: Tensor) -> Tensor:
    return torch.scalar_tensor(float("-inf"), dtype=like.dtype)


def attention_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, *, is_causal: bool = False,
    enable_gqa: bool = False,
) -> str:  # fmt: skip
    """Return the kernel that CUDA chooses: `flash`, `efficient` or `math`, tried in this order.

    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`. cuDNN's kernel, which newer releases
    prefer on Hopper and Blackwell, keeps the same tensors for backward as flash attention does.
    """
    tensors = (query, key, value)
    if all(t.dim() == 4 for t in tensors):
        if _can_use_flash(query, key, value, mask, dropout_p, is_causal=is_causal, enable_gqa=enable_gqa):
            return "flash"
        if _can_use_efficient(query, key, value, mask):
            return "efficient"
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")  # torch's own words
    return "math"


def _can_use_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, *, is_causal: bool,
    enable_gqa: bool,
) -> bool:  # fmt: skip
    """Return whether flash attention takes these inputs (sdp_utils.cpp, `can_use_flash_attention`)."""
    tensors, capability, width = (query, key, value), CAPABILITY.get() or USUAL, query.shape[-1]
    if not torch.backends.cuda.flash_sdp_enabled() or capability < (8, 0) or mask is not None:
        return False
    if any(t.dtype not in HALF or t.dtype is not query.dtype or t.shape[-1] != width for t in tensors) or width > 256:
        return False
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if consumer and width > 192 and _trains(*tensors) and not (width > 224 and not dropout_p > 0):
        return False  # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False  # check_flash_causal_non_square_seqlens
    # Heads must match, or be shared by groups of queries.
    if enable_gqa:
        heads = key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    else:
        heads = query.shape[1] == key.shape[1] == value.shape[1]
    return heads and _is_dense(tensors, None, any_stride_of_one=True)


def _can_use_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether memory-efficient attention takes these inputs.

    `can_use_mem_efficient_attention` and `minimum_gemm_alignment` in sdp_utils.cpp.
    """
    tensors, capability = (query, key, value), CAPABILITY.get() or USUAL
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or capability < (5, 0):
        return False
    dtypes = {torch.float32, torch.float16} | ({torch.bfloat16} if capability >= (8, 0) else set())
    if query.dtype not in dtypes or any(t.dtype is not query.dtype for t in tensors):
        return False
    # Head sizes must be aligned, for tensor cores more so.
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and query.dtype in HALF):  # tensor cores
        alignment = max(alignment, 8 if query.dtype in HALF else 4)
    if query.shape[-1] != key.shape[-1] or any(t.shape[-1] == 0 or t.shape[-1] % alignment for t in tensors):
        return False
    return query.shape[1] == key.shape[1] == value.shape[1] and _is_dense(tensors, mask, any_stride_of_one=False)


def _is_dense(tensors: tuple[Tensor, ...], mask: Tensor | None, *, any_stride_of_one: bool) -> bool:
    """Return whether batches are equal, no sequence is empty and rows are contiguous (sdp_utils_cpp.h)."""
    query, key, value = tensors
    if not query.shape[0] == key.shape[0] == value.shape[0] or 0 in {query.shape[-2], key.shape[-2]}:
        return False
    rows = all(t.stride(-1) == 1 for t in tensors) or (any_stride_of_one and query.shape[-1] == 1)
    return rows and (mask is None or mask.stride(-1) == 1)


def _padded_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask with rows padded to multiples of 8, then expanded (attention.cpp, `preprocess_mask`)."""
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def math_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Tensor | None = None, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compose attention of elementary ops (attention.cpp, `_scaled_dot_product_attention_math`).

    torch adds the mask out of place for tensor subclasses, and in place for plain tensors, as here.
    """
    dtype = query.dtype
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    query = query * factor
    # Mask, heads that share keys, then scores, softmax and dropout.
    if is_causal:
        seen = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
        attn_mask = torch.where(seen, 0.0, _minus_infinity(query))
        del seen
    if enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    scores = aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        if dropout_mask is None:
            scores = torch.dropout(scores, dropout_p, True)
        else:
            scores, value = scores.masked_fill(dropout_mask.logical_not(), 0.0), value * (1 / (1 - dropout_p))
    return torch.matmul(scores, value).to(dtype), scores.to(dtype)


# --- Scratch of kernels -----------------------------------------------------------------------------------------------


def efficient_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of efficient attention's backward: row sums, and accumulators in half precision.

    transformers/cuda/attention_backward.cu, `_efficient_attention_backward`: `delta`, the row sums of `grad_out * out`.
    In half precision the kernel computes them, and has float accumulators for the gradients. In float32 the product is
    made first, then its sums, then their transposed copy.
    """
    query, key, value = given["query"], given["key"], given["value"]
    rows = prod(query.shape[:-1])
    if query.dtype is torch.float32:
        return [
            (2, Scratch("floats", (rows * value.shape[-1],), "float32")),
            (2, Scratch("floats", (2 * rows,), "float32")),
        ]
    return [(2, Scratch("floats", (rows + query.numel() + key.numel() + value.numel(),), "float32"))]


def flash_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of flash attention's backward: row sums, and float accumulators of gradients.

    transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `softmax_d` and the float accumulator of dq. Both have their
    rows rounded up to 128; dq's width is rounded up to 32, beyond 128 to 64. Where heads share keys, dk and dv of every
    head are added.
    """
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, rows, width = query.shape
    rows, rounded = -(-rows // 128) * 128, -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    wanted = [(2, Scratch("floats", (batch * heads * rows * (rounded + 1),), "float32"))]
    if key.shape[1] != heads:
        expanded = (key.numel() + value.numel()) // key.shape[1] * heads
        wanted[0] = (2, Scratch("bytes", (4 * wanted[0][1].sizes[0] + expanded * key.element_size(),), ""))
    return wanted


def safe_softmax(given: Arguments, result: Tensor) -> Wanted:
    """Return the scratch of `_safe_softmax`: a plain softmax, and a mask of one byte a value (attention.cpp)."""
    return of_bytes(0, result.numel() * (result.element_size() + 1))


def fast_attention(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of inference's fused attention.

    transformers/cuda/attention.cu, `native_multi_head_attention_cuda`.
    """
    return of_bytes(LAST, _inside_attention(given["query"], given["num_head"], mask=given["mask"]))


def fast_encoder_layer(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of the fused encoder layer: attention, or the feed-forward layers if larger.

    aten/src/ATen/native/transformers/transformer.cpp, `transformer_encoder_layer_forward`. The feed-forward part has
    hidden values and output of two layers, and the tensor that is added to them.
    """
    x, norm_first, hidden = given["src"], int(given["norm_first"]), given["ffn_weight_1"].shape[0]
    unit = x.numel() * x.element_size()
    feed_forward = (2 + norm_first) * unit + unit // x.shape[-1] * hidden
    attention_ = norm_first * unit + _inside_attention(x, given["num_heads"], mask=given["mask"])
    return of_bytes(0, max(attention_, feed_forward))


def _inside_attention(x: Tensor, heads: int, *, mask: Tensor | None) -> int:
    """Return the bytes of queries, keys, values, fused attention and projection; with a mask, twice the scores."""
    unit = x.numel() * x.element_size()
    if mask is None:
        return 5 * unit
    scores = x.shape[0] * heads * x.shape[1] * x.shape[1] * x.element_size()
    return max(6 * unit, 3 * unit + 2 * scores)
