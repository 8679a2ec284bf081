"""Compare and search values as deep as their containers and objects go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

OPAQUE = (ModuleType, nn.Module, type, FunctionType, MethodType, torch.dtype, torch.device, torch.Size)
"""Kinds of objects that are not looked into."""


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911 - a case for each kind of value
    """Return whether two values are equal: tensors to the last bit, containers and objects by their contents."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_bits(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)  # noqa: PLR0124 - both are NaN
    if isinstance(one, (int, complex, str, bytes, set, frozenset)):
        return bool(one == other)
    return hasattr(one, "__dict__") and not isinstance(one, OPAQUE) and same(vars(one), vars(other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bytes.

    Unlike `==`, this is true for equal NaNs and false for 0.0 and -0.0.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        *(t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (one, other))
    )


def tensors_in(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Tensor]:
    """Return the tensors that can be reached from `value`, each once, by their path in it."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return {}
    seen.add(id(value))
    if isinstance(value, Tensor):
        return {path: value}
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        names = (f"#{n}" if isinstance(key, Tensor) else key for n, key in enumerate(value))
        inside = (
            (f"{path}[{key!r}]" if path else str(key), part) for key, part in zip(names, value.values(), strict=True)
        )
    elif isinstance(value, (list, tuple, deque)):
        inside = ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (*OPAQUE, Optimizer)):
        inside = ((f"{path}.{name}", part) for name, part in vars(value).items())
    return {name: tensor for where, part in inside for name, tensor in tensors_in(part, where, seen).items()}


def replace_in(value: Any, tensor: Tensor, by: Tensor) -> None:
    """Replace `tensor` by `by` wherever `value` has it, in containers and objects as deep as they go."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = [*value.items()]
    elif isinstance(value, (list, deque)):
        items = [*enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (*OPAQUE, Tensor, Optimizer)):
        replace_in(vars(value), tensor, by)
        return
    else:
        return
    for key, part in items:
        if part is tensor:
            value[key] = by
        else:
            replace_in(part, tensor, by)
