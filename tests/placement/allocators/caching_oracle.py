"""The oracle of native/allocators/caching.hpp: the same rules in Python, as a program of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tests.placement.allocators.caching_pool_oracle import CachingPool
from tests.placement.allocators.expandable_oracle import ExpandableSegments

from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.simulated_device import round_up

# Constants of c10/core/AllocatorConfig.h, torch 2.13.
MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MIN_LARGE_SEGMENT_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
FIRST_DIVISION_INTERVAL = 20


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
