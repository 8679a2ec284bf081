"""Checksums of bytes written to a store, compared when they are read."""

from __future__ import annotations

import zlib

from torch import Tensor

from overspill.core.errors import StoreError
from overspill.core.units import format_bytes

from .lanes import Slot
from .stores import Store, memory_of


class Checksums:
    """Reads and writes `store` with a CRC-32 of all bytes.

    CPU only, because there the processor sees the bytes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[tuple[int, int], int] = {}

    def write(self, slot: Slot, source: Tensor) -> None:
        """Record the checksum of `source`, then write it."""
        self.note(slot, source)
        self._store.write(slot, source)

    def fetch(self, slot: Slot, target: Tensor) -> None:
        """Fill `target`. Raises StoreError if the bytes differ from those written."""
        self._store.fetch(slot, target)
        self.check(slot, target)

    def check(self, slot: Slot, memory: Tensor) -> None:
        """Raise StoreError if the bytes of a slot, which are `memory`, differ from those written."""
        expected = self._of.get((slot.chunk, slot.offset))
        if expected is not None and zlib.crc32(memory_of(memory)) != expected:
            raise StoreError(
                f"the {self._store.name} store gave back other bytes than it was given "
                f"({format_bytes(memory.numel())}): their checksums differ"
            )

    def note(self, slot: Slot, memory: Tensor) -> None:
        """Record the checksum of the bytes of a slot, which are `memory`."""
        self._of[slot.chunk, slot.offset] = zlib.crc32(memory_of(memory))

    def forget(self, slot: Slot) -> None:
        """Drop the checksum of `slot`, because nothing has been written to it since."""
        self._of.pop((slot.chunk, slot.offset), None)
