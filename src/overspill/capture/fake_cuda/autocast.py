"""Apply CUDA's autocast rules to fake CPU tensors.

aten/src/ATen/autocast_mode.h and autocast_mode.cpp, as of torch 2.14. Inside `cuda_autocast()` the CPU's autocast key
has CUDA's rule of every op with one. Ops with a rule for the CPU alone lose it. If both run an op in lower precision,
the CPU's own kernel stays: it casts the same arguments and keeps them in the same cache.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from overspill.pytorch.dispatch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    close_library,
    ops_with_kernel,
    overload_name,
    schema_of,
)
from overspill.pytorch.storages import is_view

from .fake import tensors_in

_KEY = "AutocastCPU"
_FLASH = "_scaled_dot_product_flash_attention"

# AT_FORALL_LOWER_PRECISION_FP. Ops of cuDNN alone (cudnn_convolution) never reach a fake tensor.
LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    _FLASH, "scaled_dot_product_attention",
)  # fmt: skip
# Of these, the CPU's autocast has its own (AutocastCPU, lower_precision_fp cast policy).
_LOWER_ON_CPU = {
    "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "prelu", "addmm", "matmul", "mm", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "scaled_dot_product_attention",
}  # fmt: skip
# AT_FORALL_FP32.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: float32 is what their optional dtype is, and the input stays as it is.
WITH_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, fp32_append_dtype: the same, by another overload.
APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE: all arguments in float32 if one of them is, in lower precision otherwise.
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
BANNED = ("binary_cross_entropy",)


class _Casts:
    """Weights in lower precision, cast once in each region (autocast_mode.cpp, `cached_cast`)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget all casts: the region ends."""
        self._known.clear()

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in the region's dtype; a weight's cast is kept."""
        dtype = torch.get_autocast_dtype("cpu")
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not is_view(tensor)
        if not weight or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._known[id(tensor)] = (weakref.ref(tensor), tensor.to(dtype))
        return known[1]


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if _eligible(tensor) else tensor


def _each(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `cast` applied to all tensors in it."""
    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(item, cast) for item in value])
    return value


def _plain(op: Any, args: Any, kwargs: Any) -> Any:
    with ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return op(*args, **kwargs)


def _casting(op: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _plain(op, _each(args, cast), {name: _each(value, cast) for name, value in kwargs.items()})

    return run


def _asking(op: Any) -> Callable[..., Any]:
    position = next(i for i, argument in enumerate(schema_of(op).arguments) if argument.name == "dtype")

    def run(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        values = (x, *args)
        if len(values) > position:
            values, dtype = values[:position], values[position]
        if dtype is None and _eligible(x):
            dtype = torch.float32
        names = [argument.name for argument in schema_of(op).arguments[: len(values)]]
        named = dict(zip(names, values, strict=True)) | kwargs
        return _plain(op, (named.pop(names[0]),), named | {"dtype": dtype})

    return run


def _appending(op: Any, with_dtype: Any) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _eligible(x):
            return _plain(op, (x, *args), kwargs)
        if overload_name(with_dtype) == "ScalarOpt_dtype" and not args:
            args = (kwargs.pop("p", 2),)
        elif len(args) < 3 and "keepdim" not in kwargs and overload_name(with_dtype) == "ScalarOpt_dim_dtype":
            kwargs["keepdim"] = False
        return _plain(with_dtype, (x, *args), kwargs | {"dtype": torch.float32})

    return run


def _promoting(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = {tensor.dtype for tensor in tensors_in(kwargs.values(), tensors_in(args, []))}
        widest = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(widest) if _eligible(tensor) else tensor

        return _plain(op, _each(args, cast), {name: _each(value, cast) for name, value in kwargs.items()})

    return run


def _banned(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA; "
        "use binary_cross_entropy_with_logits or BCEWithLogitsLoss without the sigmoid before it"
    )


def overload(name: str) -> Any:
    """Return the aten op with this name, as in autocast_mode.h: `prod` or `prod.dim_int`."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), variant or "default")


def _rules(casts: _Casts) -> dict[str, Callable[..., Any]]:
    """Return replacements of ops for which CUDA's autocast differs from the CPU's, by name."""
    here = ops_with_kernel("AutocastCUDA")  # a torch without CUDA has them too
    rules: dict[str, Callable[..., Any]] = {}
    for name in LOWER:
        if name not in _LOWER_ON_CPU and name != _FLASH:  # flash attention comes with inputs that are cast
            rules[name] = _casting(overload(name), casts.lower)
    rules |= {name: _casting(overload(name), _float32) for name in FLOAT32 if f"aten::{name}" in here}
    rules |= {name: _asking(overload(name)) for name in WITH_DTYPE}
    rules |= {name: _appending(overload(name), overload(other)) for name, other in APPEND_DTYPE.items()}
    rules |= {name: _promoting(overload(name)) for name in PROMOTE}
    rules |= dict.fromkeys(BANNED, _banned)
    return {name: rule for name, rule in rules.items() if f"aten::{name}" in here}


@contextmanager
def _registered(casts: _Casts) -> Iterator[None]:
    """Register CUDA's rules on the CPU's autocast key, inside the block."""
    rules = _rules(casts)
    library = torch.library.Library("aten", "IMPL")
    # Ops with a rule for the CPU alone lose it.
    others = {name.removeprefix("aten::") for name in ops_with_kernel(_KEY) if name.startswith("aten::")}
    others -= rules.keys() | _LOWER_ON_CPU
    try:
        with warnings.catch_warnings():  # torch warns of each kernel that is replaced
            warnings.simplefilter("ignore")
            for name, rule in rules.items():
                library.impl(overload(name), rule, _KEY)
            for name in others:
                library.impl(name, torch.library.fallthrough_kernel, _KEY)
        yield
    finally:
        close_library(library)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make `torch.autocast("cuda")` cast fake CPU tensors as CUDA does, inside the block."""
    casts = _Casts()
    original, clear = torch.autocast.__init__, torch.clear_autocast_cache
    enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    gpu_dtype, available = torch.get_autocast_gpu_dtype, torch.amp.autocast_mode.is_autocast_available

    # A region for cuda becomes one for the CPU, in float16 by default.
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

    def clear_cache() -> None:
        casts.clear()
        clear()

    # torch's questions about cuda are answered with the CPU's state.
    replaced = [
        (torch.autocast, "__init__", init, original),
        (torch, "is_autocast_enabled", is_enabled, enabled),
        (torch, "get_autocast_dtype", get_dtype, dtype_of),
        (torch, "get_autocast_gpu_dtype", get_dtype, gpu_dtype),
        (torch, "clear_autocast_cache", clear_cache, clear),
        (torch.amp, "is_autocast_available", lambda device: device == "cuda" or available(device), available),
    ]
    with _registered(casts):
        try:
            for owner, name, replacement, _ in replaced:
                setattr(owner, name, replacement)
            yield
        finally:
            for owner, name, _, before in replaced:
                setattr(owner, name, before)
            casts.clear()
