"""A step's inputs: their kind, and splitting into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import RequestError
from overspill.pytorch.trees import tree_flatten, tree_unflatten

from .step.unpacked import Constant


def kind(leaf: Any) -> Any:
    """Shape, strides, dtype and device of one input: its part of a plan's key. Of what is no tensor, the constant of a plan."""
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else Constant(leaf)


def repeats(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each of the inputs the position of the first that is the same tensor; of what is no tensor, its own."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i for i, leaf in enumerate(leaves))


def tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the inputs, in order."""
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def same(inputs: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether two calls have equal inputs."""
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
    """Bytes of a call's `inputs` outside the micro-batch `batch`."""
    return _nbytes(inputs) - _nbytes(batch)


def _nbytes(inputs: tuple[Any, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors(inputs))
