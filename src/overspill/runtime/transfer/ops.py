"""The functions that lowered graphs call for transfers: plain ones, for PyTorch's dispatcher costs more than they do.

`await_offload` takes the source as an argument: whoever manages memory by reference counts then keeps it until the copy is
done. `await_prefetch` returns its argument, and consumers read that.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.fx.node import has_side_effect

from overspill.core.errors import OverspillError

from .engine import TransferEngine

_ENGINES: WeakValueDictionary[int, TransferEngine] = WeakValueDictionary()
_numbers = itertools.count(1)


def register_engine(engine: TransferEngine) -> int:
    """The number by which lowered graphs call `engine`; whoever lowers keeps the engine alive."""
    number = next(_numbers)
    _ENGINES[number] = engine
    return number


def engine_numbered(number: int) -> TransferEngine:
    """The engine of that number. Raises OverspillError where it has been closed."""
    try:
        return _ENGINES[number]
    except KeyError:
        raise OverspillError("the store of this compiled model has been closed; compile the model again") from None


def offload(source: Tensor, engine: int) -> Tensor:
    """Start copying `source` to the store; its handle."""
    return engine_numbered(engine).offload(source)


def await_offload(handle: Tensor, source: Tensor, engine: int) -> None:
    """Wait until the copy of `source` is done."""
    engine_numbered(engine).await_offload(handle, source)


def prefetch(handle: Tensor, engine: int, into: UntypedStorage | None = None) -> Tensor:
    """Start bringing `handle` back, to `into` if it is given; the tensor, not to be read yet."""
    return engine_numbered(engine).prefetch(handle, into)


def await_prefetch(arriving: Tensor, engine: int) -> Tensor:
    """Wait until `arriving` is filled; it."""
    return engine_numbered(engine).await_prefetch(arriving)


def hold(held: Tensor) -> None:
    """Let `held` live until here."""


for _call in (offload, await_offload, await_prefetch, hold):
    has_side_effect(_call)


def fake_handle() -> Tensor:
    """A fake handle, made inside the caller's fake mode."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")
