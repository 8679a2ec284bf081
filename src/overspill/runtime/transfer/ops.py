"""Transfer functions that lowered graphs call.

They are plain functions, because PyTorch's dispatcher costs more than they do. `await_offload` takes the source as an
argument, so that reference counting keeps it until the copy is done. `await_prefetch` returns its argument, and
consumers read that.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.fx import Graph
from torch.fx.node import has_side_effect, map_arg

from overspill.core.errors import OverspillError

from .engine import TransferEngine, make_engine
from .registry import make_store
from .tiers import Directories

_ENGINES: dict[int, weakref.ref[TransferEngine]] = {}
_numbers = itertools.count(1)


def register_engine(engine: TransferEngine) -> int:
    """Return a number by which lowered graphs call `engine`. The caller keeps the engine alive."""
    number = next(_numbers)
    known = _ENGINES  # which a module that is torn down no longer names
    known[number] = weakref.ref(engine, lambda _: known.pop(number, None))
    return number


def open_engine(
    store: str | None,
    where: torch.device,
    directory: Directories = None,
    host_bytes: int | None = None,
    *,
    checksum: bool = False,
) -> tuple[TransferEngine, int]:
    """Return an engine with a new store for tensors on `where`, and its number for lowered graphs.

    Raises RequestError and StoreError.
    """
    engine = make_engine(make_store(store, where, directory, host_bytes), where, checksum=checksum)
    return engine, register_engine(engine)


def engine_numbered(number: int) -> TransferEngine:
    """Return the engine with this number. Raises OverspillError if it has been closed."""
    if (known := _ENGINES.get(number)) is not None and (engine := known()) is not None:
        return engine
    raise OverspillError("the store of this compiled model has been closed; compile the model again")


def offload(source: Tensor, engine: int) -> Tensor:
    """Start copying `source` to the store, and return its handle."""
    return engine_numbered(engine).offload(source)


def await_offload(handle: Tensor, source: Tensor, engine: int) -> None:
    """Wait until the copy of `source` is done."""
    engine_numbered(engine).await_offload(handle, source)


def prefetch(handle: Tensor, engine: int, into: UntypedStorage | None = None) -> Tensor:
    """Start bringing `handle` back, and return the tensor, not to be read yet.

    Its bytes go to `into` if given.
    """
    return engine_numbered(engine).prefetch(handle, into)


def await_prefetch(arriving: Tensor, engine: int) -> Tensor:
    """Wait until `arriving` is filled, and return it."""
    return engine_numbered(engine).await_prefetch(arriving)


def to_disk(handle: Tensor, engine: int) -> None:
    """Let the bytes of `handle` go on to the disk below the store."""
    engine_numbered(engine).to_disk(handle)


def from_disk(handle: Tensor, engine: int) -> None:
    """Bring the bytes of `handle` back from the disk below the store."""
    engine_numbered(engine).from_disk(handle)


def hold(held: Tensor) -> None:
    """Keep `held` alive until this call."""


class UpdateOnHost:
    """A call that starts an update on the host, `run` of tensors on the store's memory.

    `views` makes its arguments of the whole tensors.
    """

    def __init__(self, run: Callable[..., None], views: Graph, engine: int, what: str) -> None:
        self._run = run
        *calls, output = (node for node in views.nodes if node.op != "placeholder")
        self._calls = [(node, node.target, node.args, node.kwargs) for node in calls]
        self._inputs, self._args = views.find_nodes(op="placeholder"), output.args[0]
        self._engine = engine
        self._what = what

    def __call__(self, given: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Start it on what is in the store as the handles `given`, of which it writes some."""
        engine_numbered(self._engine).update(self._what, self._on, given, writes)

    def _on(self, *tensors: Tensor) -> None:
        values = dict(zip(self._inputs, tensors, strict=True))
        for node, target, args, kwargs in self._calls:
            values[node] = target(*map_arg(args, values.__getitem__), **map_arg(kwargs, values.__getitem__))
        self._run(*map_arg(self._args, values.__getitem__))


def end_updates(engine: int) -> None:
    """Wait for updates on the host at the end of a step that needs them."""
    engine_numbered(engine).end_step()


for _call in (offload, await_offload, await_prefetch, to_disk, from_disk, hold):
    has_side_effect(_call)


def fake_handle() -> Tensor:
    """Return a fake handle, made inside the caller's fake mode."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")
