"""Compute output shapes of the most frequent ops of convolutional networks and transformers, without torch.

torch finds the shapes of a batch norm's backward from some thirty elementary ops. For contiguous tensors the answer is
a line each; any other case returns None here and goes to torch. `tests/capture/fake_cuda/test_fake.py` compares these
answers with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Shape = tuple[int, ...]
# For each output its shape, None for an output that is not made; all in the dtype of the first argument.
Shapes = tuple[Shape | None, ...]


def _plain(*tensors: Tensor | None) -> bool:
    """Return whether all are float32 and contiguous, and in no other memory format."""
    return all(
        t is None
        or (
            t.dtype is torch.float32
            and t.is_contiguous()
            and (t.dim() < 3 or (t.shape[1] > 1 and max(t.shape[2:]) > 1))
        )
        for t in tensors
    )


def _convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Shapes | None:  # fmt: skip
    del output_padding
    spatial = x.dim() - 2
    lengths = {len(stride), len(padding), len(dilation)}
    if (
        transposed
        or x.dim() != w.dim()
        or lengths != {spatial}
        or not _plain(x, bias)
        or x.shape[1] != w.shape[1] * groups
    ):
        return None
    # The usual formula, for each spatial dimension.
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    if not w.is_contiguous() or w.dtype is not torch.float32 or min(size) < 1 or max(size) < 2 or w.shape[0] < 2:
        return None
    return ((x.shape[0], w.shape[0], *size),)


def _convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: Sequence[int] | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Shapes | None:  # fmt: skip
    del stride, padding, dilation, output_padding, groups
    if transposed or x.dim() != w.dim() or not _plain(grad, x, w) or (mask[2] and not bias_sizes):
        return None
    shapes = (tuple(x.shape), tuple(w.shape), tuple(bias_sizes or ()))
    return tuple(shape if wanted else None for shape, wanted in zip(shapes, mask, strict=True))


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> Shapes | None:  # fmt: skip
    del momentum, eps
    if not training or x.dim() < 3 or not _plain(x, weight, bias, mean, variance):
        return None
    return (tuple(x.shape), (x.shape[1],), (x.shape[1],))


def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, training: bool, eps: float, mask: Sequence[bool],
) -> Shapes | None:  # fmt: skip
    del eps
    if (
        not training
        or x.dim() < 3
        or weight is None
        or not _plain(grad, x, weight, mean, variance, save_mean, save_invstd)
    ):
        return None
    shapes = (tuple(x.shape), (x.shape[1],), (x.shape[1],))
    return tuple(shape if wanted else None for shape, wanted in zip(shapes, mask, strict=True))


def _relu(x: Tensor) -> Shapes | None:
    return (tuple(x.shape),) if _plain(x) else None


def _relu_backward(grad: Tensor, x: Tensor, threshold: float) -> Shapes | None:
    del threshold
    return (tuple(x.shape),) if grad.shape == x.shape and _plain(grad, x) else None


def _product(a: Tensor, b: Tensor) -> Shapes | None:
    if not a.dtype is b.dtype is torch.float32 or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return None
    return ((a.shape[0], b.shape[1]),)


def _linear(bias: Tensor, a: Tensor, b: Tensor, **factors: float) -> Shapes | None:
    del factors
    return _product(a, b) if _plain(bias) and bias.shape == b.shape[1:] else None


def _layer_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Shapes | None:
    del eps
    start = x.dim() - len(normalized)
    if not _plain(x, weight, bias) or start < 0 or list(x.shape[start:]) != list(normalized):
        return None
    rows = (*x.shape[:start], *(1 for _ in normalized))
    return (tuple(x.shape), rows, rows)


def _embedding(weight: Tensor, indices: Tensor, *rest: Any) -> Shapes | None:
    del rest
    return ((*indices.shape, weight.shape[1]),) if _plain(weight) and indices.is_contiguous() else None


def _elementwise(x: Tensor | float, other: Tensor | float, **factors: float) -> Shapes | None:
    if not isinstance(x, Tensor):  # torch.add(1, x)
        return None
    alike = not isinstance(other, Tensor) or (other.shape == x.shape and _plain(other))
    return (tuple(x.shape),) if alike and not factors and type(other) is not complex and _plain(x) else None


SHAPES: dict[Any, Callable[..., Shapes | None]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.relu.default: _relu,
    aten.threshold_backward.default: _relu_backward,
    aten.mm.default: _product,
    aten.addmm.default: _linear,
    aten.native_layer_norm.default: _layer_norm,
    aten.embedding.default: _embedding,
    aten.add.Tensor: _elementwise,
    aten.mul.Tensor: _elementwise,
}


def contiguous_stride(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
