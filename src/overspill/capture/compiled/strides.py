"""Keep the strides of tensors updated in place while a step is traced.

A trace has a new tensor in place of an update. The new one has the strides of the op's results, which may differ, and
then ops that read it may take other kernels: after `scatter_add_` a tensor in channels-last would be contiguous, and
one with sizes of 1 loses the strides by which a convolution picks its layout. Elements with gaps between them would
become dense.

Names private to PyTorch that this file relies on (2.11 to 2.14): `FunctionalTensorMode.__torch_dispatch__`, a
FunctionalTensor's `elem`, `commit_update` and `sync`, and `torch._functionalize_replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_leaves

from .joint import written_by


@contextmanager
def strides_kept() -> Iterator[None]:
    """Let in-place updates keep the strides of traced tensors, inside the block."""
    dispatch: Callable[..., Any] = FunctionalTensorMode.__torch_dispatch__

    def run(mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = dispatch(mode, op, types, args, kwargs)
        changes_view = torch.Tag.inplace_view in getattr(op, "tags", ())
        for tensor in [] if changes_view else tree_leaves(written_by(op, args, kwargs or {})):
            if isinstance(tensor, FunctionalTensor):
                _restore(tensor)
        return results

    with patch.object(FunctionalTensorMode, "__torch_dispatch__", run):
        yield


def _restore(tensor: FunctionalTensor) -> None:
    """Give the traced value of `tensor` the strides that `tensor` has in eager."""
    tensor.sync()
    value, strides = torch._from_functional_tensor(tensor.elem), tensor.stride()
    if value.shape == tensor.shape and value.stride() != strides:
        value = _in_order(value, strides)
        if _same_places(value, strides):
            value = value.as_strided(value.shape, strides)
        torch._functionalize_replace(tensor.elem, value)
        tensor.commit_update()
        tensor.sync()


def _in_order(value: Tensor, strides: Sequence[int]) -> Tensor:
    """`value` with its dimensions laid out in the order of `strides`, copied if they are in another."""
    if _same_places(value, strides):
        return value
    order, back = _orders(strides)
    return value.permute(order).contiguous().permute(back)


def in_order_of(like: Tensor, make: Callable[[list[int]], Tensor]) -> Tensor:
    """What `make` makes of sizes, with the shape of `like` and its dimensions laid out in the same order."""
    order, back = _orders(like.stride())
    return make([like.shape[dim] for dim in order]).permute(back)


def _orders(strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dimensions from the largest stride to the smallest, and for each its position there."""
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    return order, [order.index(dim) for dim in range(len(strides))]


def _same_places(value: Tensor, strides: Sequence[int]) -> bool:
    """Whether elements have the addresses that `strides` give them; dimensions of size 1 do not count."""
    return all(a == b for size, a, b in zip(value.shape, value.stride(), strides, strict=True) if size != 1)
