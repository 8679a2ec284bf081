"""What ranks tell one another where they do not agree: errors, keys and their digests, and the difference in words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from overspill.core.errors import OverspillError


@dataclass(frozen=True)
class RankFailure:
    """An error in the form that other ranks receive."""

    kind: type[Exception]
    message: str
    details: dict[str, Any]
    """Attributes of the error."""

    @classmethod
    def of(cls, error: Exception) -> RankFailure:
        """Return `error` in that form."""
        if isinstance(error, OverspillError):
            return cls(type(error), str(error), vars(error))
        return cls(OverspillError, f"{type(error).__name__}: {error}", {})

    def error(self, rank: int) -> Exception:
        """Return the error that `rank` has sent."""
        error = self.kind.__new__(self.kind, f"rank {rank}: {self.message}")
        vars(error).update(self.details)
        return error


@dataclass(frozen=True)
class Told:
    """A message of a rank when agreement fails."""

    text: str = ""
    """Its key."""
    shapes: str = ""
    """The shapes in its key."""
    failure: RankFailure | None = None
    """Its error, if it has one."""


def raise_first(failures: Sequence[RankFailure | None]) -> None:
    """Raise the error of the first rank that has one."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure.error(rank)


def difference(rank: int, mine: Told, other: int, its: Told) -> str:
    """Return the error text for two ranks with different keys."""
    if mine.shapes == its.shapes:
        return (
            f"rank {rank} and rank {other} differ in the kinds of their inputs, training mode, requires_grad or "
            "autocast of the same step, or one plans a call of which the other has a plan"
        )
    return (
        f"a compiled model that is sharded needs inputs of the same shapes on all ranks: rank {rank} has "
        f"{mine.shapes}, rank {other} has {its.shapes}; pad to one length that all ranks know (padding='max_length') "
        "and leave partial batches out (drop_last=True), or use overspill.train_step, which takes other lengths on each"
    )


def different_graphs(names: Sequence[Sequence[str]]) -> str:
    """Return the error text for ranks whose graphs differ, given their op names."""
    where = "the sizes of their tensors"
    for rank, other in enumerate(names[1:], start=1):
        for index, (first, second) in enumerate(zip_longest(names[0], other, fillvalue="missing")):
            if first != second:
                where = f"op {index}, which is {first} on rank 0 and {second} on rank {rank}"
                break
    return (
        f"the ranks have different graphs: they differ in {where}; model, loss and options must be the same on all, "
        "and the answers to what the model asks of values"
    )


def digest_of(text: str) -> int:
    """Return seven bytes of a hash, as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def text_of(key: Any) -> str:
    """Return `key` as text that is equal on all ranks.

    Numbers of devices and constants of the caller are left out.
    """
    if isinstance(key, torch.device):
        return key.type
    if isinstance(key, tuple) and not isinstance(key, torch.Size):
        return f"({', '.join(filter(None, map(text_of, key)))})"
    return "" if isinstance(key, str) else str(tuple(key) if isinstance(key, torch.Size) else key)


def shapes_of(key: Any) -> str:
    """Return the shapes in `key`, in words."""
    if isinstance(key, torch.Size):
        return str(tuple(key))
    return " ".join(filter(None, map(shapes_of, key))) if isinstance(key, tuple) else ""
