"""The oracle of native/allocators/expandable.hpp: address space reserved once, memory mapped by page.

    segment   | live | free ......| unmapped ...................................|
              ^base               ^always a whole number of pages from the base

Rules: c10/cuda/CUDACachingAllocator.cpp (pytorch 001074d2), find_expandable_block, map_block, unmap_block.
"""

from __future__ import annotations

from tests.placement.allocators.caching_pool_oracle import CachingPool, PoolOwner

from overspill.placement.allocators.blocks import FreeBlocks, PoolBlock
from overspill.placement.simulated_device import round_up

UNLIMITED_RESERVATION_BYTES = 1 << 46
"""Address space of one segment on an unlimited device."""


class ExpandableSegments:
    """Maps and unmaps the pages of a CachingAllocator's expandable segments."""

    def __init__(self, allocator: PoolOwner) -> None:
        self._allocator = allocator
        self._device = allocator.device
        # Nine eighths of the device's memory, so that unmapped pages can come back at the end of the segment.
        total = allocator.device.capacity_bytes
        self._reservation = UNLIMITED_RESERVATION_BYTES if total is None else total + total // 8

    def best_of(self, free: FreeBlocks, position: int) -> PoolBlock:
        """The block at `position`, or a later one with more room to grow."""
        block = free.at(position)
        while position + 1 < len(free):
            following = free.at(position + 1)
            if following.stream != block.stream or _room(following) >= _room(block):
                break
            block = following
            position += 1
        return block

    def grow(self, pool: CachingPool, size: int, stream: int) -> PoolBlock | None:
        """A block of at least `size` bytes with its missing pages mapped.

        It is outside the pool; None without memory.
        """
        block = self._candidate(pool, size, stream)
        if block is None or (not block.mapped and not self._map(block, min(block.size, size))):
            return None
        # Map what follows until there is enough.
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.free.remove(self._allocator.key(block))
        return block

    def release(self, pool: CachingPool) -> None:
        """Unmap whole pages inside free blocks. Segments left without memory are given up."""
        for block in list(pool.free):
            self._unmap(block)
            if not block.split:
                pool.unmapped.remove((block.stream, block.address))
                self._device.unreserve(block.address, block.size)

    def _candidate(self, pool: CachingPool, size: int, stream: int) -> PoolBlock | None:
        """The lowest block followed by `size` bytes of free or unmapped space."""
        unmapped = pool.unmapped
        for position in range(unmapped.position((stream,)), len(unmapped)):
            block = unmapped.at(position)
            if block.stream != stream:
                break
            if block.prev is not None and block.prev.free:
                block = block.prev
            if _space(block, size) >= size:
                return block
        # None there: reserve a new segment.
        reservation = round_up(self._reservation, pool.page_bytes)
        base = self._device.reserve(reservation) if size <= reservation else None
        if base is None:
            return None
        block = PoolBlock(base, reservation, stream, mapped=False, base=base, pool=pool, born=self._allocator.birth())
        unmapped.add((stream, base), block)
        return block

    def _map(self, block: PoolBlock, size: int) -> bool:
        """Map the pages of an unmapped block's first `size` bytes; whether it worked."""
        pool: CachingPool = block.pool
        nbytes = round_up(size, pool.page_bytes)
        address = block.address
        if not self._device.map(address, nbytes):
            return False
        # Split off what stays unmapped.
        pool.unmapped.remove((block.stream, address))
        if nbytes < block.size:
            rest = PoolBlock(
                address + nbytes, block.size - nbytes, block.stream, mapped=False, base=block.base, pool=pool
            )
            rest.born = self._allocator.birth()
            _splice(rest, block, block.next)
            pool.unmapped.add((rest.stream, rest.address), rest)
            block.size = nbytes
        # What is mapped joins its free neighbours.
        block.mapped = True
        self._allocator.join(block, block.prev)
        self._allocator.join(block, block.next)
        self._allocator.put(block)
        self._allocator.log_exchange("segment_map", address, nbytes, block.stream)
        return True

    def _unmap(self, block: PoolBlock) -> None:
        """Unmap all whole pages inside a free block. What is left of it at either side stays free."""
        pool: CachingPool = block.pool
        end = block.address + block.size
        first = block.base + round_up(block.address - block.base, pool.page_bytes)
        last = end - (end - block.base) % pool.page_bytes
        if first >= last:
            return
        # Keep both sides as free blocks.
        pool.free.remove(self._allocator.key(block))
        if first > block.address:
            self._leave_free(block, block.address, first, block.prev, block)
        if last < end:
            self._leave_free(block, last, end, block, block.next)
        block.address, block.size, block.mapped = first, last - first, False
        self._allocator.join(block, block.prev)
        self._allocator.join(block, block.next)
        pool.unmapped.add((block.stream, block.address), block)
        self._device.unmap(first, last - first)
        self._allocator.log_exchange("segment_unmap", first, last - first, block.stream)

    def _leave_free(
        self, block: PoolBlock, start: int, end: int, before: PoolBlock | None, after: PoolBlock | None
    ) -> None:
        part = PoolBlock(
            start, end - start, block.stream, base=block.base, pool=block.pool, born=self._allocator.birth()
        )
        _splice(part, before, after)
        self._allocator.put(part)


def _room(block: PoolBlock) -> int:
    """Bytes that the free `block` can grow to, with unmapped ones behind it."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _space(block: PoolBlock, enough: int) -> int:
    """Bytes of `block` and of the free ones after it, up to `enough`."""
    nbytes = 0
    at: PoolBlock | None = block
    while at is not None and at.free and nbytes < enough:
        nbytes += at.size
        at = at.next
    return nbytes


def _splice(block: PoolBlock, before: PoolBlock | None, after: PoolBlock | None) -> None:
    """Link `block` between its neighbours."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
