"""CUDA's autocast rules on fake CPU tensors: which ops run in lower precision, which in float32.

aten/src/ATen/autocast_mode.h, `AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`, `AT_FORALL_FP32_SET_OPT_DTYPE`. The
CPU's own rules have nearly the same ops in lower precision, but leave to the input's dtype most of what CUDA runs in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HALF = {torch.float16, torch.bfloat16}
# Run in float32 under CUDA's autocast; those that the CPU's autocast casts already are left to it.
_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "logsumexp", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "prod", "prod.dim_int", "cumprod",
    "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
# These take the dtype of their result as an option instead of a cast input.
_WITH_DTYPE = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod")


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _HALF:
        return value.to(torch.float32)
    if isinstance(value, (list, tuple)):
        return type(value)([_float32(item) for item in value])
    return value


def _casting(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(*_float32(args), **{name: _float32(value) for name, value in kwargs.items()})

    return run


def _asking(op: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None) -> Any:
        positional = [a for a in args if not isinstance(a, torch.dtype)]
        asked = dtype or next((a for a in args if isinstance(a, torch.dtype)), None)
        if asked is None and x.dtype in _HALF:
            asked = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return op(x, *positional, dtype=asked)

    return run


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")` casts as CUDA's does, for tensors that are really fake CPU ones."""
    library = torch.library.Library("aten", "IMPL")
    for name in dict.fromkeys(_FLOAT32 + _WITH_DTYPE):
        op = _overload(name)
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "AutocastCPU"):
            continue
        library.impl(op, _asking(op) if name in _WITH_DTYPE else _casting(op), "AutocastCPU")
    original = torch.autocast.__init__
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def init(
        self: torch.autocast, device_type: str = "cuda", dtype: torch.dtype | None = None, enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:  # fmt: skip
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def is_enabled(device_type: str = "cuda") -> bool:
        return bool(enabled("cpu" if device_type == "cuda" else device_type))

    def get_dtype(device_type: str = "cuda") -> torch.dtype:
        return dtype_of("cpu" if device_type == "cuda" else device_type)

    torch.autocast.__init__ = init
    torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, get_dtype
    torch.get_autocast_gpu_dtype, gpu_dtype = get_dtype, torch.get_autocast_gpu_dtype
    try:
        yield
    finally:
        torch.autocast.__init__ = original
        torch.is_autocast_enabled, torch.get_autocast_dtype = enabled, dtype_of
        torch.get_autocast_gpu_dtype = gpu_dtype
        library._destroy()
