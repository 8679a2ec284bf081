"""Blocks of a segment, and an index of the free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class PoolBlock:
    """`size` bytes at `address`, linked to its neighbours in the segment."""

    address: int
    size: int
    stream: int = 0
    requested: int = 0
    """The requested size; 0 when free."""
    free: bool = True
    mapped: bool = True
    """False for address space without memory."""
    prev: PoolBlock | None = None
    next: PoolBlock | None = None
    born: int = 0
    """Numbers blocks by their creation."""
    indexed_at: int = 0
    """The age counter when the block became free."""
    base: int = 0
    """Where its segment starts."""
    pool: Any = None
    """Belongs to the allocator."""

    @property
    def split(self) -> bool:
        """Whether the block is only part of its segment."""
        return self.prev is not None or self.next is not None

    @property
    def last(self) -> bool:
        """Whether no live block follows it in its segment."""
        following = self.next
        while following is not None and following.free:
            following = following.next
        return following is None

    def cut(self, size: int) -> PoolBlock:
        """Split off the first `size` bytes as a new block."""
        front = PoolBlock(self.address, size, self.stream, prev=self.prev, next=self, base=self.base, pool=self.pool)
        front.mapped = self.mapped
        if self.prev is not None:
            self.prev.next = front
        self.prev = front
        self.address += size
        self.size -= size
        return front

    def absorb(self, other: PoolBlock) -> None:
        """Merge the adjacent block `other` into this one."""
        if self.prev is other:
            self.address = other.address
            self.prev = other.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.size += other.size


class FreeBlocks:
    """Free blocks in the order of a key, which must not change while the block is in here."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._blocks: dict[Key, PoolBlock] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PoolBlock]:
        return (self._blocks[key] for key in tuple(self._keys))

    def add(self, key: Key, block: PoolBlock) -> None:
        """Insert `block` at `key`."""
        insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, key: Key) -> PoolBlock:
        """Remove and return the block at `key`."""
        del self._keys[bisect_left(self._keys, key)]
        return self._blocks.pop(key)

    def position(self, key: Key) -> int:
        """Return the number of blocks before `key`."""
        return bisect_left(self._keys, key)

    def at(self, position: int) -> PoolBlock:
        """Return the block at `position`."""
        return self._blocks[self._keys[position]]
