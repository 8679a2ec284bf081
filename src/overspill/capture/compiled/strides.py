"""Give traced tensors the strides that they have in eager.

PyTorch's fake results of some ops have another layout than those of the kernels. A `reshape` may then be traced as a
view although it copies, and later ops may take other kernels. `REAL` has the layouts of such results.

Where eager updates a tensor in place, a trace makes a new one. It has the strides of the op's results, which may
differ, and then ops that read it may take other kernels. After `scatter_add_` a tensor in channels-last would be
contiguous. One with sizes of 1 loses the strides by which a convolution picks its layout. Elements with gaps between
them would become dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from overspill.pytorch.decompositions import suggest_memory_format
from overspill.pytorch.fake_tensors import (
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    functional_value,
    replace_value,
)
from overspill.pytorch.schemas import Arguments, arguments, written_arguments
from overspill.pytorch.trees import tree_leaves

aten = torch.ops.aten


def _contiguous(_: Arguments) -> Any:
    """Return the layout that is dense, with the dimensions in their order."""
    return torch.contiguous_format


def _on_cpu(name: str) -> Callable[..., Any]:
    """Return a rule: on the CPU, the memory format of the argument `name`, whatever the order of its dimensions."""

    def found(given: Arguments) -> Any:
        return suggest_memory_format(given[name]) if given[name].device.type == "cpu" else None

    return found


def _like_product(given: Arguments) -> Any:
    """Return the strides of a product, the CPU's kernel; on a GPU, the memory format of the gradient."""
    gradient, mask = given["grad_output"], given["mask"]
    return (gradient * mask).stride() if gradient.device.type == "cpu" else suggest_memory_format(gradient)


def _like_sum(first: str, second: str) -> Callable[..., Any]:
    """Return a rule: the strides of the sum of two arguments.

    A kernel of several operands follows the first of them. Both may be numbers.
    """

    def found(given: Arguments) -> Any:
        summed = given[first] + given[second]
        return summed.stride() if isinstance(summed, Tensor) else None

    return found


def _like_noise(given: Arguments) -> Any:
    """Return the strides of the product with the noise, in training."""
    return (given["noise"] * given["grad_output"]).stride() if given["training"] else None


REAL: dict[Any, Callable[[Arguments], Any]] = {
    aten._log_softmax_backward_data.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.log_sigmoid_forward.default: lambda given: (
        torch.contiguous_format if given["self"].device.type == "cpu" else None
    ),
    aten.native_dropout_backward.default: _like_product,
    aten.binary_cross_entropy_backward.default: lambda given: torch.empty_like(given["self"]).stride(),
    aten.pow.Scalar: _contiguous,
    aten.float_power.Scalar: _contiguous,
    aten.rrelu_with_noise_backward.default: _like_noise,
    aten.copysign.Tensor: _like_sum("self", "other"),
    aten.div.Tensor_mode: _like_sum("self", "other"),
    aten.elu_backward.default: _like_sum("grad_output", "self_or_result"),
    aten.hardsigmoid_backward.default: _like_sum("grad_output", "self"),
    aten.hardswish_backward.default: _like_sum("grad_output", "self"),
    aten.hardtanh_backward.default: _like_sum("grad_output", "self"),
    aten.logit_backward.default: _like_sum("grad_output", "self"),
    aten.softplus_backward.default: _like_sum("grad_output", "self"),
    aten.special_xlog1py.default: _like_sum("self", "other"),
    aten.xlogy.Tensor: _like_sum("self", "other"),
    aten._native_batch_norm_legit_functional.default: _on_cpu("input"),
    aten._native_batch_norm_legit.default: _on_cpu("input"),
    aten._native_batch_norm_legit.no_stats: _on_cpu("input"),
    aten._native_batch_norm_legit_no_training.default: _on_cpu("input"),
    aten.native_batch_norm.default: _on_cpu("input"),
    aten.native_batch_norm_backward.default: _on_cpu("input"),
    aten.channel_shuffle.default: _on_cpu("self"),
    aten.max_unpool2d.default: _on_cpu("self"),
    aten.reflection_pad2d_backward.default: _on_cpu("self"),
    aten.reflection_pad3d.default: _on_cpu("self"),
    aten.reflection_pad3d_backward.default: _on_cpu("self"),
    aten.replication_pad2d_backward.default: _on_cpu("self"),
    aten.replication_pad3d.default: _on_cpu("self"),
    aten.replication_pad3d_backward.default: _on_cpu("self"),
}
"""For ops whose fake results have another layout: the memory format, or the strides, of the kernel's first result.

Results of the same shape as the first one have the same layout. A rule returns None where the fake result is right.
"""


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Give fake results the strides of the kernels' results, inside the block."""
    dispatch: Callable[..., Any] = FakeTensorMode.dispatch

    def run(mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = dispatch(mode, op, types, args, kwargs)
        if op not in REAL or results is NotImplemented:  # tensors of another kind run it themselves
            return results
        with mode:
            return _lying_as(results, REAL[op](arguments(op, args, kwargs or {})))

    with patch.object(FakeTensorMode, "dispatch", run):
        yield


def _lying_as(results: Any, how: Any) -> Any:
    """Return fake `results`, those of the first one's shape with this memory format or these strides."""
    if how is None or results is None:
        return results
    if isinstance(results, (tuple, list)):
        shape = results[0].shape if results[0] is not None else None
        return tuple(_lying_as(r, how) if isinstance(r, Tensor) and r.shape == shape else r for r in results)
    if isinstance(how, torch.memory_format):
        return torch.empty_like(results, memory_format=how)
    return torch.empty_strided(results.shape, how, dtype=results.dtype, device=results.device)


@contextmanager
def strides_kept() -> Iterator[None]:
    """Make in-place updates keep the strides of traced tensors, inside the block."""
    dispatch: Callable[..., Any] = FunctionalTensorMode.__torch_dispatch__

    def run(mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = dispatch(mode, op, types, args, kwargs)
        changes_view = torch.Tag.inplace_view in getattr(op, "tags", ())
        for tensor in [] if changes_view else tree_leaves(written_arguments(op, args, kwargs or {})):
            if isinstance(tensor, FunctionalTensor):
                _restore(tensor)
        return results

    with patch.object(FunctionalTensorMode, "__torch_dispatch__", run):
        yield


def _restore(tensor: FunctionalTensor) -> None:
    """Give the traced value of `tensor` the strides that `tensor` has in eager."""
    tensor.sync()
    value, strides = functional_value(tensor.elem), tensor.stride()
    if value.shape == tensor.shape and value.stride() != strides:
        value = _in_order(value, strides)
        if _same_places(value, strides):
            value = value.as_strided(value.shape, strides)
        replace_value(tensor.elem, value)
        tensor.commit_update()
        tensor.sync()


def _in_order(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return `value` with its dimensions laid out in the order of `strides`, copied if they are in another."""
    if _same_places(value, strides):
        return value
    order, back = _orders(strides)
    return value.permute(order).contiguous().permute(back)


def in_order_of(like: Tensor, make: Callable[[list[int]], Tensor]) -> Tensor:
    """Return a tensor with the shape of `like` and its dimensions laid out in the same order.

    `make` makes it, given the sizes in the order of memory.
    """
    order, back = _orders(like.stride())
    return make([like.shape[dim] for dim in order]).permute(back)


def _orders(strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the dimensions from the largest stride to the smallest, and for each its position there."""
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(len(strides))]


def _same_places(value: Tensor, strides: Sequence[int]) -> bool:
    """Return whether elements have the addresses that `strides` give them; dimensions of size 1 do not count."""
    return all(a == b for size, a, b in zip(value.shape, value.stride(), strides, strict=True) if size != 1)
