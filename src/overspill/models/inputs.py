"""The inputs that a user gives a model, at any batch size.

They are tensors, a tuple or dict of them, or a function that makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import RequestError
from overspill.pytorch.fake_tensors import FakeTensor


class Inputs:
    """The inputs of a model, which can be made at other batch sizes.

    `batch` is their batch size, the first dimension of the first tensor, if they have one.
    """

    def __init__(self, inputs: Any) -> None:
        """Raise RequestError if `inputs` holds no tensor."""
        self._inputs = inputs if callable(inputs) else _each(inputs, _on_host)
        self._by_size = callable(inputs) and _takes_argument(inputs)
        tensors = [] if callable(inputs) else tensors_in(inputs)
        if not callable(inputs) and not tensors:
            raise RequestError(f"inputs holds no tensor: {type(inputs).__name__}")
        first = tensors[0] if tensors else None
        self.batch: int | None = first.shape[0] if first is not None and first.dim() else None

    def at(self, batch: int | None) -> Any:
        """Return the inputs with `batch` samples.

        They are the result of the function; otherwise the given integers, in `batch` rows, and zeros for all other
        tensors. Raises RequestError if a function takes a batch size and `batch` is None.
        """
        if callable(self._inputs):
            if self._by_size and batch is None:
                raise RequestError("inputs is a function of the batch size; pass batch=")
            return self._inputs(batch) if self._by_size else self._inputs()
        return _each(self._inputs, lambda tensor: _like(tensor, self.batch, batch))


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _takes_argument(function: Callable[..., Any]) -> bool:
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind in positional for p in parameters)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with all tensors in nested tuples, named ones too, lists and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_each(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() if _is_whole(tensor) and _has_values(tensor) else tensor


def _like(tensor: Tensor, batch: int | None, size: int | None) -> Tensor:
    """Return a tensor of that shape, whose first dimension is `size` where it was `batch`."""
    shape = list(tensor.shape)
    if shape and size is not None and shape[0] == batch:
        shape[0] = size
    if _is_whole(tensor):
        if not _has_values(tensor):
            return torch.empty(shape, dtype=tensor.dtype)
        return tensor[torch.arange(shape[0]) % tensor.shape[0]] if tensor.numel() and shape else tensor.clone()
    made = torch.zeros(shape, dtype=tensor.dtype)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        made = made.contiguous(memory_format=torch.channels_last)
    return made.requires_grad_(tensor.requires_grad)
