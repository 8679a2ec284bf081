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


class Inputs:
    """The inputs of a model, which can be made at other batch sizes.

    `batch` is their batch size, the first dimension of the first tensor, if they have one.
    """

    def __init__(self, inputs: Any) -> None:
        """Raises RequestError where there is no tensor among `inputs`."""
        self._inputs = inputs
        self._by_size = callable(inputs) and _takes_argument(inputs)
        tensors = [] if callable(inputs) else tensors_in(inputs)
        if not callable(inputs) and not tensors:
            raise RequestError(f"inputs holds no tensor: {type(inputs).__name__}")
        first = tensors[0] if tensors else None
        self.batch: int | None = first.shape[0] if first is not None and first.dim() else None

    def at(self, batch: int | None) -> Any:
        """The inputs with `batch` samples.

        They are what the function returns, or zeros of their shapes and dtypes. Raises RequestError where a function
        wants a batch size and `batch` is None.
        """
        if callable(self._inputs):
            if self._by_size and batch is None:
                raise RequestError("inputs is a function of the batch size; pass batch=")
            return self._inputs(batch) if self._by_size else self._inputs()
        return _like(self._inputs, self.batch, batch)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _takes_argument(function: Callable[..., Any]) -> bool:
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind in positional for p in parameters)


def _like(value: Any, batch: int | None, size: int | None) -> Any:
    """Zeros of the shapes and dtypes in `value`. The first dimension is `size` where it was `batch`."""
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if shape and size is not None and shape[0] == batch:
            shape[0] = size
        made = torch.zeros(shape, dtype=value.dtype)
        if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous():
            made = made.contiguous(memory_format=torch.channels_last)
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: _like(item, batch, size) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_like(item, batch, size) for item in value])
    return value
