"""The inputs of a step: their kind, and splitting into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import RequestError
from overspill.pytorch.trees import tree_flatten, tree_unflatten

from .step.unpacked import Constant


def kind(leaf: Any) -> Any:
    """Return the part of a plan's key for one input: shape, strides, dtype and device of a tensor.

    An input that is no tensor is a constant of the plan.
    """
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else Constant(leaf)


def kind_of_any_size(leaf: Any) -> Any:
    """Return the same without shape and strides, which may differ between ranks."""
    return (leaf.dim(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else Constant(leaf)


def repeats(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each input the position of the first one that is the same tensor.

    An input that is no tensor has its own position.
    """
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i for i, leaf in enumerate(leaves))


def tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors among the inputs, in order."""
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def same(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return whether two calls have equal inputs."""
    leaves, spec = tree_flatten(inputs)
    other_leaves, other_spec = tree_flatten(others)
    return spec == other_spec and all(map(_same, leaves, other_leaves))


def _same(one: Any, other: Any) -> bool:
    alike = one is other or kind(one) == kind(other)
    return alike and (not isinstance(one, Tensor) or one is other or torch.equal(one, other))


def split(inputs: tuple[Any, ...], count: int) -> Iterator[tuple[Any, ...]]:
    """Split `inputs` into `count` micro-batches along the first dimension.

    Tensors without dimensions, and other values, go to each. Raises RequestError.
    """
    if count == 1:
        yield inputs
        return
    leaves, spec = tree_flatten(inputs)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or min(sizes) % count:
        what = f"{min(sizes)} samples" if len(sizes) == 1 else f"tensors of {sorted(sizes)} samples"
        raise RequestError(
            f"{what} cannot be split into {count} equal micro-batches; "
            f"every input needs the same first dimension, a multiple of {count}"
        )
    parts = [leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves]
    for index in range(count):
        batch: tuple[Any, ...] = tree_unflatten([part[index] for part in parts], spec)
        yield batch


def bytes_outside(inputs: tuple[Any, ...], batch: tuple[Any, ...]) -> int:
    """Return the bytes of a call's `inputs` outside the micro-batch `batch`."""
    return _nbytes(inputs) - _nbytes(batch)


def _nbytes(inputs: tuple[Any, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors(inputs))
