"""The oracle of native/allocators/caching.hpp and expandable.hpp: the same rules in Python, as a program of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import FreeBlocks, Key, PoolBlock
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.simulated_device import round_up

# Constants of c10/core/AllocatorConfig.h, torch 2.13.
MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MIN_LARGE_SEGMENT_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
FIRST_DIVISION_INTERVAL = 20
UNLIMITED_RESERVATION_BYTES = 1 << 46
"""Address space of one segment on an unlimited device."""


class CachingPool:
    """Free blocks of one kind, small or large.

    With expandable segments also the address space yet without memory. `searches` is the clock by which garbage
    collection measures age.
    """

    def __init__(self, *, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.free = FreeBlocks()
        self.unmapped = FreeBlocks()
        self.searches = 0


class CachingAllocator(Allocator):
    """PyTorch's CUDA allocator, without graph capture and `record_stream`."""

    name = "pytorch"
    summary: ClassVar = "PyTorch's caching allocator"
    source: ClassVar = "c10/cuda/CUDACachingAllocator.cpp, pytorch 001074d2 and later; settings of torch 2.13"
    config_type: ClassVar = CachingConfig
    config: CachingConfig

    def __init__(self, config: CachingConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._small = CachingPool(small=True, page_bytes=SMALL_SEGMENT_BYTES)
        self._large = CachingPool(small=False, page_bytes=self.config.large_segment_bytes)
        self._births = 0
        # setMemoryFraction: a limit exists only for a fraction below 1, and garbage is collected only with a limit.
        fraction = self.config.per_process_memory_fraction
        limited = capacity_bytes is not None and fraction < 1
        self._limit = int(fraction * float(capacity_bytes or 0)) if limited else None
        self._collects = self._limit is not None and self.config.garbage_collection_threshold > 0
        self._expandable = ExpandableSegments(self) if self.config.expandable_segments else None

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = round_size(nbytes, self.config.roundup_power2_divisions)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._find(pool, size, stream) or self._new_block(pool, size, stream)
        if block is not None and self._splits(pool, block.size - size, size):
            block = self._split(block, size)
        return block

    def _return_block(self, block: PoolBlock) -> None:
        self.join(block, block.prev)
        self.join(block, block.next)
        self.put(block)

    def _idle_blocks(self) -> Iterator[PoolBlock]:
        for pool in (self._large, self._small):
            yield from pool.free
            yield from pool.unmapped

    def _find(self, pool: CachingPool, size: int, stream: int) -> PoolBlock | None:
        """Take the best free block of the stream out of the pool (get_free_block)."""
        pool.searches += self._collects
        free = pool.free
        position = free.position((stream, size))
        if position == len(free):
            return None
        block = free.at(position)
        if block.stream != stream:
            return None
        if self._expandable is not None:
            block = self._expandable.best_of(free, position)
        # Large blocks are not split, and serve only requests of nearly their size.
        most = self.config.max_split_bytes
        if most is not None:
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + self.config.max_non_split_rounding_bytes:
                return None
        return free.remove(self.key(block))

    def _new_block(self, pool: CachingPool, size: int, stream: int) -> PoolBlock | None:
        """A block of new memory. If the device has none, after releasing cached segments, in PyTorch's order."""
        if self._collects:
            self._collect_garbage()
        block = self._grow(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._grow(pool, size, stream)
        if block is None:
            self._release_cached()
            self.retries += 1
            block = self._grow(pool, size, stream)
        return block

    def _grow(self, pool: CachingPool, size: int, stream: int) -> PoolBlock | None:
        """A block of at least `size` bytes of new memory, or None (alloc_block)."""
        nbytes = segment_size(size, self.config.large_segment_bytes)
        if self._limit is not None and self.reserved.now + nbytes > self._limit:
            return None
        if self._expandable is not None:
            return self._expandable.grow(pool, size, stream)
        block = self._segment_malloc(nbytes, stream)
        if block is not None:
            block.pool, block.born, block.base = pool, self.birth(), block.address
        return block

    def _splits(self, pool: CachingPool, rest: int, size: int) -> bool:
        """Whether the `rest` of a block is split off (should_split)."""
        if pool.small or self._expandable is not None:
            return rest >= MIN_BLOCK_BYTES
        most = self.config.max_split_bytes
        return rest > SMALL_BYTES and (most is None or size < most)

    def _split(self, block: PoolBlock, size: int) -> PoolBlock:
        front = block.cut(size)
        front.born = self.birth()
        self.put(block)
        return front

    def _release_oversize(self, pool: CachingPool, size: int, stream: int) -> bool:
        """Release blocks that are never split; whether they are enough. release_available_cached_blocks."""
        most = self.config.max_split_bytes
        if most is None or self._expandable is not None:
            return False
        wanted = max(size, most)
        position = pool.free.position((stream, wanted))
        if position < len(pool.free) and pool.free.at(position).stream == stream:
            self._release(pool.free.at(position))
            return True
        # No single block is enough: release several, the largest first.
        released = 0
        while position and released < wanted:
            position -= 1
            block = pool.free.at(position)
            if block.stream != stream or block.size < most:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def empty_cache(self) -> None:
        """Release all cached segments, as torch.cuda.empty_cache does."""
        self._release_cached()

    def _release_cached(self) -> None:
        """Release all segments without live blocks (release_cached_blocks). Large ones first."""
        for pool in (self._large, self._small):
            if self._expandable is not None:
                self._expandable.release(pool)
                continue
            for block in list(pool.free):
                if not block.split:
                    self._release(block)

    def _collect_garbage(self) -> None:
        """Release old large segments until the threshold is met.

        Those of at least average age (garbage_collect_cached_blocks).
        """
        threshold = int(self.config.garbage_collection_threshold * float(self._limit or 0))
        target = self.reserved.now - threshold
        idle = [block for block in self._large.free if not block.split and self._expandable is None]
        searches = self._large.searches
        age = sum(searches - block.indexed_at for block in idle)
        # Repeat with the new average while that releases anything.
        reclaimed, released = 0, True
        while target > reclaimed and released and idle:
            mean = age / len(idle)
            released = False
            for block in list(idle):
                if searches - block.indexed_at >= mean:
                    released = True
                    reclaimed += block.size
                    age -= searches - block.indexed_at
                    idle.remove(block)
                    self._release(block)

    def _release(self, block: PoolBlock) -> None:
        """Give a whole segment back to the device."""
        block.pool.free.remove(self.key(block))
        self._segment_free(block)

    def birth(self) -> int:
        """A number for a new block."""
        self._births += 1
        return self._births

    def key(self, block: PoolBlock) -> Key:
        """The sort key of a free block: stream, size, tie-break."""
        if self.config.tie_break != "address":
            rank = block.born if self.config.tie_break == "oldest" else -block.base
            return (block.stream, block.size, rank, block.address)
        return (block.stream, block.size, block.address)

    def put(self, block: PoolBlock) -> None:
        """Put `block` among the free ones of its pool (insert_into_blocks)."""
        block.indexed_at = block.pool.searches
        block.pool.free.add(self.key(block), block)

    def join(self, block: PoolBlock, other: PoolBlock | None) -> None:
        """Merge the free neighbour `other` into `block` (try_merge_blocks). Only one of the same kind."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.free.remove(self.key(other))
        else:
            other.pool.unmapped.remove((other.stream, other.address))
        block.absorb(other)


def round_size(nbytes: int, divisions: tuple[int, ...]) -> int:
    """`nbytes` rounded up to a block size (round_size).

    To 512 bytes, or to a division of a power of 2.
    """
    if nbytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    floor = nbytes.bit_length() - 1
    interval = min(max(floor - FIRST_DIVISION_INTERVAL, 0), len(divisions) - 1)
    count = divisions[interval]
    if count > 1 and nbytes > MIN_BLOCK_BYTES * count:
        return round_up(nbytes, (1 << floor) // count)
    return round_up(nbytes, MIN_BLOCK_BYTES)


def segment_size(size: int, large_segment_bytes: int) -> int:
    """Bytes of a new segment for a block of `size` (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_SEGMENT_BYTES:
        return large_segment_bytes
    return round_up(size, ROUND_LARGE_BYTES)


class ExpandableSegments:
    """Maps and unmaps the pages of a CachingAllocator's expandable segments."""

    def __init__(self, allocator: CachingAllocator) -> None:
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
