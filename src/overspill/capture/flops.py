"""FLOPs of ops, by torch's formulas, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from overspill.pytorch.schemas import written_arguments
from overspill.pytorch.storages import storage_key
from overspill.pytorch.trees import tree_leaves


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of an op, a packet of overloads that `flop_registry` has."""
    if "scaled_dot_product" in op.__name__:
        args = _with_all_heads(args)
    return int(flop_registry[op](*args, **kwargs, out_val=result))


def has_formula(func: Any) -> bool:
    """Return whether torch has a formula for an op's overload; an op without one is memory-bound."""
    return getattr(func, "overloadpacket", None) in flop_registry


def flops_of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of an op's overload; 0 for ops without a formula."""
    return flops_of(func.overloadpacket, args, kwargs, result) if has_formula(func) else 0


def moved_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of `tensors`, which an op reads or writes: each view, at most its storage."""
    return sum(min(t.numel() * t.element_size(), int(t.untyped_storage().nbytes())) for t in tensors)


def tensors_of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    """Return the tensors that a call of an op reads, and then those that it writes or makes; none if it makes views.

    One that is updated in place is there twice.
    """
    given = _distinct((args, kwargs))
    written = _distinct(written_arguments(func, args, kwargs))
    there = {storage_key(tensor) for tensor in given.values()}
    made = {key: tensor for key, tensor in _distinct(result).items() if storage_key(tensor) not in there}
    return [*given.values(), *written.values(), *made.values()] if written or made else []


def _distinct(values: Any) -> dict[int, Tensor]:
    return {id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)}


def _with_all_heads(args: Sequence[Any]) -> list[Any]:
    """Return queries, keys and values, with keys and values for each head that queries have.

    PyTorch 2.11 does not count heads that share keys and values.
    """
    tensors = [a for a in args if isinstance(a, Tensor) and a.dim() == 4]
    heads = max((t.shape[1] for t in tensors), default=0)
    shared = {id(t) for t in tensors if 0 < t.shape[1] < heads}
    with torch.no_grad():
        return [a[:, :1].expand(-1, heads, -1, -1) if id(a) in shared else a for a in args]
