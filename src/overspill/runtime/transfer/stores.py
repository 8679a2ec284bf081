"""What all stores for offloaded bytes share.

A store allocates slots of one arena and reuses freed ones, so that after the first step it neither grows nor fragments
further. Reads and writes run on a lane, never on the compute thread (except to enqueue them, for CUDA).
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator
from threading import RLock
from typing import ClassVar

import torch
from torch import Tensor, UntypedStorage

from overspill.core import Tiers, Verb
from overspill.plans.plan import Plan

from .forks import tell_of_forks
from .lanes import HeldSlot, Lane, Slot, ThreadLane

PAGE_BYTES = 4096


class Store(ABC):
    """Base of all stores.

    Free slots of equal (page-rounded) size are reused; the arena grows only when none is free. Finalizers release slots
    too, and may run in the middle of anything, even `allocate`. So `release` takes no lock: released slots go to a
    queue, which the next `allocate` empties.
    """

    name: ClassVar[str] = ""
    """Its name for users."""
    device_type: ClassVar[str] = "cpu"
    """The device type whose tensors it holds."""
    takes_directory: ClassVar[bool] = False
    """Whether its constructor takes a directory for its file."""
    stays: ClassVar[bool] = True
    """Whether the memory of a slot is always the same."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._returned: deque[Slot] = deque()
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self._tails: list[tuple[int, int]] = []  # per chunk: (first unused byte, size)
        self._used_bytes = 0
        self.peak_bytes = 0
        self.is_forked = False
        """Whether this process is a child of the one that made the store."""
        tell_of_forks(self)

    def forked(self) -> None:
        """Reset the lock in a forked child."""
        self._lock = RLock()
        self.is_forked = True

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        with self._lock:
            self._take_back()
            return self._used_bytes

    def _take_back(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._used_bytes -= slot.nbytes
            self._free[slot.nbytes].append(slot)

    def lanes(self, device: torch.device) -> tuple[Lane, Lane]:  # noqa: ARG002 - of the streams of some devices
        """Return one lane each way for transfers from and to `device`."""
        return (  # `write` and `read` as they are when a copy runs
            ThreadLane("offload", lambda slot, source: self.write(slot, source)),  # noqa: PLW0108
            ThreadLane("prefetch", lambda slot, target: self.fetch(slot, target)),  # noqa: PLW0108
        )

    def hold(self, tensor: Tensor) -> Slot:
        """Return a slot for a dense `tensor` in host memory, whose bytes are read from where they are.

        Raises StoreError where the store must copy them, and they do not fit.
        """
        return HeldSlot.of(tensor)

    @abstractmethod
    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Return the memory of a slot on the host, to be read and written there as long as the slot is used."""

    @contextlib.contextmanager
    def lent(self, slot: Slot, nbytes: int, *, writes: bool) -> Iterator[UntypedStorage]:  # noqa: ARG002 - of some
        """Let the host read the memory of a slot, and change it if it `writes`. Raises StoreError."""
        yield self.memory(slot, nbytes)

    @abstractmethod
    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Return the bytes of a slot where they are, as memory of the host, `[nbytes]` of uint8.

        The tensor holds `keep` as long as its memory is used: the handle, for another tensor may get the slot after it.
        """

    def let_go(self) -> None:  # noqa: B027 - a thread's copies hold their tensors themselves
        """Free the tensors that were held and have left."""

    def fetch(self, slot: Slot, target: Tensor) -> None:
        """Fill `target` (uint8, one dimension) from a slot of the store, or from where a tensor is held."""
        if isinstance(slot, HeldSlot):
            ctypes.memmove(target.data_ptr(), slot.memory.data_ptr(), target.numel())
        else:
            self.read(slot, target)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole arena."""
        return sum(size for _, size in self._tails)

    def reserve(self, nbytes: int, tiers: Tiers | None = None) -> None:  # noqa: ARG002 - of stores on a disk
        """Grow the arena to `nbytes` in all, for a plan with `tiers`. Raises StoreError if they do not fit."""
        with self._lock:
            if (missing := nbytes - self.capacity_bytes) > 0:
                self._add_chunk(missing)

    def allocate(self, nbytes: int) -> Slot:
        """Return a slot for `nbytes` bytes. Raises StoreError if they do not fit."""
        rounded = max(PAGE_BYTES, whole_pages(nbytes))
        with self._lock:
            self._take_back()
            slot = self._find(rounded)
            self._used_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            return slot

    def _find(self, nbytes: int) -> Slot:
        if slots := self._free[nbytes]:
            return slots.pop()
        chunk = next((i for i, (used, size) in enumerate(self._tails) if used + nbytes <= size), None)
        if chunk is None:
            self._add_chunk(nbytes)
            chunk = len(self._tails) - 1
        used, size = self._tails[chunk]
        self._tails[chunk] = (used + nbytes, size)
        return Slot(chunk, used, nbytes)

    def to_disk(self, slot: Slot) -> None:  # noqa: B027 - most have none
        """Let `slot` go on to the disk below, if the store has one: its next use is far."""

    def from_disk(self, slot: Slot) -> None:  # noqa: B027 - most have none
        """Bring `slot` back from the disk below, if it is there: its next use is near."""

    def expect(self, updates: int) -> None:  # noqa: B027 - most have space
        """Note so many more updates on the host to come, which give memory back."""

    def release(self, slot: Slot) -> None:
        """Free `slot`; safe to call anywhere, because it never waits."""
        if not isinstance(slot, HeldSlot):
            self._returned.append(slot)

    def _add_chunk(self, nbytes: int) -> None:
        nbytes = whole_pages(nbytes)
        self._grow(nbytes)
        self._tails.append((0, nbytes))

    @abstractmethod
    def _grow(self, nbytes: int) -> None:
        """Add a chunk of `nbytes`, or raise StoreError and change nothing."""

    @abstractmethod
    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy `source` (uint8, one dimension) into `slot`."""

    @abstractmethod
    def read(self, slot: Slot, target: Tensor) -> None:
        """Fill `target` (uint8, one dimension) from `slot`."""

    @abstractmethod
    def close(self) -> None:
        """Return everything to the system."""


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to pages, as slots and chunks are."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def store_bytes(plan: Plan) -> int:
    """Return the store bytes that one step of `plan` needs, each tensor rounded up to pages."""
    moved = plan.schedule.targets(Verb.OFFLOAD) + plan.schedule.targets(Verb.PREFETCH)
    stored = dict.fromkeys((*plan.schedule.stored, *moved))
    return sum(whole_pages(plan.graph.tensors[t].nbytes) for t in stored)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a one-dimensional uint8 CPU tensor, without a copy."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
