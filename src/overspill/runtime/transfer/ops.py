"""The transfer ops that lowered graphs call, registered with torch so that a dispatch mode sees what they make.

`await_offload` takes the source as an argument: whoever manages memory by reference counts then keeps it until the copy is
done. `await_prefetch` returns its argument as an alias, and consumers read that.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor
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


def _offload(source: Tensor, engine: int) -> Tensor:
    return engine_numbered(engine).offload(source)


def _await_offload(handle: Tensor, source: Tensor, engine: int) -> None:
    engine_numbered(engine).await_offload(handle, source)


def _prefetch(handle: Tensor, engine: int) -> Tensor:
    return engine_numbered(engine).prefetch(handle)


def _await_prefetch(arriving: Tensor, engine: int) -> Tensor:
    engine_numbered(engine).await_prefetch(arriving)
    return arriving


_library = torch.library.Library("overspill", "DEF")
_library.define("offload(Tensor source, int engine) -> Tensor")
_library.define("await_offload(Tensor handle, Tensor source, int engine) -> ()")
_library.define("prefetch(Tensor handle, int engine) -> Tensor")
_library.define("await_prefetch(Tensor(a) arriving, int engine) -> Tensor(a)")
_library.define("hold(Tensor held) -> ()")
for _name, _call in (
    ("offload", _offload),
    ("await_offload", _await_offload),
    ("prefetch", _prefetch),
    ("await_prefetch", _await_prefetch),
    ("hold", lambda held: None),  # noqa: ARG005
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")


def fake_handle() -> Tensor:
    """A fake handle, made inside the caller's fake mode."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")


OFFLOAD = torch.ops.overspill.offload.default
AWAIT_OFFLOAD = torch.ops.overspill.await_offload.default
PREFETCH = torch.ops.overspill.prefetch.default
AWAIT_PREFETCH = torch.ops.overspill.await_prefetch.default
HOLD = torch.ops.overspill.hold.default
for _op in (OFFLOAD, AWAIT_OFFLOAD, AWAIT_PREFETCH, HOLD):
    has_side_effect(_op)
