"""The memory of planned addresses: one arena for the blocks of a call, or of a step.

`placement/arena.py` decides which blocks those are, and where. The arena is memory of PyTorch's allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.core import Graph, Places, Schedule
from overspill.placement.arena import first_backward
from overspill.plans.plan import Plan
from overspill.pytorch.storages import storage_over, storage_uses

from .accelerator import empty_cache
from .transfer.forks import ForkedLock

NOWHERE = Places({}, 0, 0)


class Arena(NamedTuple):
    """Memory for the buffers of a step."""

    places: Places = NOWHERE
    """Offsets of the buffers."""
    take: Callable[[], Tensor] | None = None
    """Returns the memory; None without places."""

    def of_forward(self, graph: Graph, schedule: Schedule) -> Arena:
        """Return the same arena, with the blocks of forward alone."""
        first = first_backward(graph, schedule)
        kept = {key: offset for key, offset in self.places.offsets.items() if key[1] < first}
        return self._replace(places=replace(self.places, offsets=kept))


_OURS = 2
"""References to an arena's storage that no call uses: ours, and the caller's."""


class Arenas:
    """The arenas of a session's calls.

    An unused one is kept for the next call of the same size.
    """

    def __init__(self) -> None:
        self._memories: list[Tensor] = []
        self._lock = ForkedLock()

    def of(self, plan: Plan, device: torch.device) -> Arena:
        """Return the arena of a plan, empty if the plan has no places."""
        if plan.places is None or not plan.places.offsets:
            return Arena()
        return Arena(plan.places, self.taker(plan.places.arena_bytes, device))

    def taker(self, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that lowered graphs call for their arena.

        The session must be alive when it is called.
        """
        ours = weakref.ref(self)

        def take_arena() -> Tensor:
            arenas = ours()
            assert arenas is not None  # while a model of the session is called
            return arenas.take(nbytes, device)

        return take_arena

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return the memory for one call, `[nbytes]` of uint8, in use as long as the tensor lives."""
        with self._lock.lock:
            self._give_back(nbytes)
            idle = (m for m in self._memories if not _is_taken(m) and m.device == device)
            if (found := next(idle, None)) is None:
                found = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._memories.append(found)
            return found.view(-1)

    def give_back(self) -> None:
        """Free unused arenas before a graph runs whose plan has none."""
        if self._memories:
            with self._lock.lock:
                self._give_back(0)

    def _give_back(self, besides: int) -> None:
        """Free unused arenas, except one of `besides` bytes, which the plan of the next graph counts."""
        idle = [m for m in self._memories if not _is_taken(m)]
        kept = next((m for m in idle if m.nbytes == besides), None)
        self._memories = [m for m in self._memories if m is kept or _is_taken(m)]


def _is_taken(memory: Tensor) -> bool:
    return storage_uses(memory.untyped_storage()) > _OURS


class StepArena:
    """The arena of a train step, which also holds weights and state between steps.

    It stays from step to step, as long as plans need one of its size.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def of(self, plan: Plan) -> Arena:
        """Return the arena of a plan, empty if the plan has no places."""
        return Arena() if plan.places is None else Arena(plan.places, self.taken)

    def taken(self) -> Tensor:
        """Return its memory."""
        assert self.memory is not None  # before a step begins
        return self.memory

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return 0 if self.memory is None else self.memory.nbytes

    def renew(self, nbytes: int, device: torch.device) -> None:
        """Free its memory, and allocate `nbytes`."""
        self.memory = None
        empty_cache(device)
        if nbytes:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is in it."""
        return self.memory is not None and 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.nbytes

    def has_at(self, offset: int, tensor: Tensor) -> bool:
        """Return whether `tensor` is at `offset`."""
        return self.memory is not None and tensor.data_ptr() == self.memory.data_ptr() + offset


def storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage for bytes at `offset` of the arena; the caller keeps the arena alive."""
    return storage_over(arena.data_ptr() + offset, arena.device, nbytes)


def kept_storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage for bytes at `offset` of the arena, which keeps the arena alive."""
    return torch.from_dlpack(arena[offset : offset + nbytes]).untyped_storage()


def tensor_at(
    arena: Tensor, offset: int, nbytes: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor at `offset` of the arena; the caller keeps the arena alive."""
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage_at(arena, offset, nbytes), 0, size, stride)
