"""The memory of planned addresses: one arena for a call, or a step, in which its blocks lie.

`placement/arena.py` says which blocks those are, and where. The arena is memory of PyTorch's allocator.
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
    """The `places` of a step's buffers, and a function that gives their memory."""

    places: Places = NOWHERE
    take: Callable[[], Tensor] | None = None

    def of_forward(self, graph: Graph, schedule: Schedule) -> Arena:
        """The same for forward's blocks alone."""
        first = first_backward(graph, schedule)
        kept = {key: offset for key, offset in self.places.offsets.items() if key[1] < first}
        return self._replace(places=replace(self.places, offsets=kept))


_OURS = 2
"""References to an arena's storage that no call uses: ours, and the caller's."""


class Arenas:
    """The arenas of a session's calls.

    An unused one stays for the next call of the same size.
    """

    def __init__(self) -> None:
        self._memories: list[Tensor] = []
        self._lock = ForkedLock()

    def of(self, plan: Plan, device: torch.device) -> Arena:
        """The arena of a plan that has places, or none."""
        if plan.places is None or not plan.places.offsets:
            return Arena()
        return Arena(plan.places, self.taker(plan.places.arena_bytes, device))

    def taker(self, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        """A function that lowered graphs call for their arena.

        It needs the session to be alive.
        """
        ours = weakref.ref(self)

        def take_arena() -> Tensor:
            arenas = ours()
            assert arenas is not None  # while a model of the session is called
            return arenas.take(nbytes, device)

        return take_arena

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """The memory for one call, in use as long as the tensor lives."""
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
        """Free unused arenas, but for one of `besides` bytes. The plan of the graph that runs next counts that one."""
        idle = [m for m in self._memories if not _is_taken(m)]
        kept = next((m for m in idle if m.nbytes == besides), None)
        self._memories = [m for m in self._memories if m is kept or _is_taken(m)]


def _is_taken(memory: Tensor) -> bool:
    return storage_uses(memory.untyped_storage()) > _OURS


class StepArena:
    """The arena of a train step, in which weights and state lie between steps too.

    It stays from step to step, as long as plans need one of its size.
    """

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    def of(self, plan: Plan) -> Arena:
        """The arena of a plan that has places, or none."""
        return Arena() if plan.places is None else Arena(plan.places, self.taken)

    def taken(self) -> Tensor:
        """Its memory."""
        assert self.memory is not None  # before a step begins
        return self.memory

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return 0 if self.memory is None else self.memory.nbytes

    def renew(self, nbytes: int, device: torch.device) -> None:
        """Give its memory back, and take as much as that."""
        self.memory = None
        empty_cache(device)
        if nbytes:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in it."""
        return self.memory is not None and 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.nbytes

    def has_at(self, offset: int, tensor: Tensor) -> bool:
        """Whether `tensor` lies at `offset`."""
        return self.memory is not None and tensor.data_ptr() == self.memory.data_ptr() + offset


def storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage for bytes at `offset` of the arena, kept alive by the caller."""
    return storage_over(arena.data_ptr() + offset, arena.device, nbytes)


def kept_storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage for bytes at `offset` of the arena, which it keeps alive."""
    return torch.from_dlpack(arena[offset : offset + nbytes]).untyped_storage()


def tensor_at(
    arena: Tensor, offset: int, nbytes: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor at `offset` of the arena."""
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage_at(arena, offset, nbytes), 0, size, stride)
