"""Offloaded bytes in pageable host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from overspill.core.errors import StoreError
from overspill.core.units import format_bytes
from overspill.pytorch.storages import storage_over

from . import host_memory
from .lanes import HeldSlot, Slot
from .stores import Store


class HostStore(Store):
    """Pageable host memory, outside the budget of the device."""

    name = "host"
    _advice = "use --store disk, or a larger budget"

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[Tensor] = []

    def _grow(self, nbytes: int) -> None:
        try:
            self._chunks.append(self._allocate_chunk(nbytes))
        except (OSError, RuntimeError):
            raise StoreError(
                f"the host store needs {format_bytes(nbytes)} more of host memory, and the system refused; "
                f"{self._advice}"
            ) from None

    def _allocate_chunk(self, nbytes: int) -> Tensor:
        return self._new_pages(nbytes)

    def _new_pages(self, nbytes: int) -> Tensor:
        return host_memory.whole_pages(nbytes)

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy into the arena, releasing the interpreter lock."""
        ctypes.memmove(self._chunks[slot.chunk].data_ptr() + slot.offset, source.data_ptr(), source.numel())

    def read(self, slot: Slot, target: Tensor) -> None:
        """Copy out of the arena, releasing the interpreter lock."""
        ctypes.memmove(target.data_ptr(), self._chunks[slot.chunk].data_ptr() + slot.offset, target.numel())

    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Return the slot's part of the arena, as a storage of its own."""
        if isinstance(slot, HeldSlot):
            address = slot.tensor.data_ptr()
        else:
            address = self._chunks[slot.chunk].data_ptr() + slot.offset
        return storage_over(address, torch.device("cpu"), nbytes)

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Return the slot's part of the arena, as a storage of its own."""
        if isinstance(slot, HeldSlot):
            return slot.memory
        chunk = self._chunks[slot.chunk]
        kind: Any = type("Shown", (ctypes.c_uint8 * nbytes,), {})
        memory = kind.from_address(chunk.data_ptr() + slot.offset)
        memory.keep = chunk, keep
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Free the arena."""
        self._chunks.clear()
