"""A model ready to train: module, batches and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overspill.core.errors import RequestError

if TYPE_CHECKING:  # `overspill models` lists the names without paying for torch
    from torch import Tensor, nn

DTYPES = ("float32", "bfloat16", "float16", "amp", "amp-bfloat16")
"""Dtypes to train a model in: amp is autocast in float16 with a GradScaler, amp-bfloat16 autocast in bfloat16."""
IMAGE_SIZE, SEQ_LEN = 224, 128
"""The default sizes of the inputs of a user's model."""
IGNORED = -100
"""The label that counts in no loss: the default `ignore_index` of PyTorch's."""


@dataclass(frozen=True)
class BuiltModel:
    """A model to train, with its batches and its loss.

    `loss(module, *make_batch(batch_size))` is the scalar that a step minimises.
    """

    name: str
    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, ...]]
    """Samples CPU tensors from torch's global generator, so that a seed fixes the data."""
    loss: Callable[..., Tensor]
    varied: bool = False
    """Whether batches have other sizes each time."""
    assumed: str = ""
    """In words, the placeholder values for what the user left unspecified."""


def checked_size(
    name: str,
    option: str,
    size: int | None,
    *,
    default: int,
    minimum: int = 1,
    maximum: int | None = None,
    multiple: int = 1,
) -> int:
    """Return `size`, or `default` if None, checked for network `name`.

    Raises RequestError for a size that the network cannot take.
    """
    if size is None:
        return default
    if size < minimum:
        raise RequestError(f"{option}={size} is too small for {name}; the smallest is {minimum}")
    if maximum is not None and size > maximum:
        raise RequestError(f"{option}={size} is too large for {name}; the largest is {maximum}")
    if size % multiple:
        raise RequestError(f"{option}={size} does not suit {name}; it must be a multiple of {multiple}")
    return size
