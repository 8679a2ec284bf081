"""The oracle of native/allocators/chunked.hpp: the same rules in Python, as a program of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tests.placement.allocators.caching_oracle import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES

from overspill.placement.allocators.base import Allocator, SegmentAction
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.allocators.chunked import ChunkedConfig
from overspill.placement.simulated_device import PAGE_BYTES, round_up

LARGE_SEGMENT_BYTES, MIN_LARGE_SEGMENT_BYTES = 20 << 20, 10 << 20  # of c10/core/AllocatorConfig.h, torch 2.13
SMALL_SHARE = 2
"""Requests up to a chunk divided by this get no chunks, which would be mostly empty."""


class ChunkedAllocator(Allocator):
    """Chunks behind consecutive virtual addresses, kept when a block is freed.

    Any chunks serve any request, so it succeeds if enough of them are free or the device has more. It has no external
    fragmentation. Chunks stay at the addresses at which they were freed. A block of as many chunks takes them there.
    Any other block unmaps those of the smallest such block first. It never frees chunks to the device. A smaller chunk
    wastes less (eq. 1), a larger one is mapped in fewer calls.

    Small requests, of half a chunk at most, are in segments of a caching allocator, as in the paper's framework
    (sony/nnabla-ext-cuda, CudaCachedVirtualArray).
    """

    name = "chunked"
    summary: ClassVar = "chunks of memory mapped behind consecutive addresses, no external fragmentation"
    source: ClassVar = "Out-of-core training ... with adaptive window-based scheduling, section 4"
    config_type: ClassVar = ChunkedConfig
    config: ChunkedConfig

    def __init__(self, config: ChunkedConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._kept_bytes = 0
        self._small = _SmallBlocks(self)

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        if nbytes <= self.config.chunk_bytes // SMALL_SHARE:
            found = self._small.find(nbytes, stream)
            self.retries = self._small.retries
            return found
        size = round_up(nbytes, self.config.chunk_bytes)
        block = self._first(size, stream)
        if block is not None and (block.size, block.stream) == (size, stream):
            return self._take(block)
        block = self._combined(size, stream)
        if block is None:
            self._small.release()
            self._small.retries += 1
            block = self._combined(size, stream)
        self.retries = self._small.retries
        return block

    def empty_cache(self) -> None:
        self._unmap(self._kept_bytes)
        self._small.release()

    def _combined(self, size: int, stream: int) -> PoolBlock | None:
        # New addresses, over kept chunks first, then new ones.
        address = self.device.reserve(size)
        if address is None:
            return None
        kept = min(size, self._kept_bytes)
        if kept < size and not self.device.map(address, size - kept):
            self.device.unreserve(address, size)
            return None
        self._unmap(kept)
        if kept:
            self.device.map(address + size - kept, kept)
        self.log_exchange("segment_map", address, size, stream)
        return PoolBlock(address, size, stream)

    def _return_block(self, block: PoolBlock) -> None:
        if block.size < self.config.chunk_bytes:
            self._small.give_back(block)
        else:
            self._put(block)

    def _idle_blocks(self) -> Iterator[PoolBlock]:
        yield from self._idle
        yield from self._small.idle()

    def usable_bytes(self, request_bytes: int) -> int:
        """Return the bytes of all kept chunks, if they suffice together.

        They can be combined. For a small request, return the bytes of free blocks.
        """
        if request_bytes <= self.config.chunk_bytes // SMALL_SHARE:
            return super().usable_bytes(request_bytes)
        return self._kept_bytes if self._kept_bytes >= request_bytes else 0

    def _key(self, block: PoolBlock) -> Key:
        return block.size, block.stream, block.address

    def _put(self, block: PoolBlock) -> None:
        self._kept_bytes += block.size
        super()._put(block)

    def _take(self, block: PoolBlock) -> PoolBlock:
        self._kept_bytes -= block.size
        return super()._take(block)

    def _unmap(self, nbytes: int) -> None:
        """Unmap `nbytes` of kept chunks from the smallest free blocks."""
        while nbytes:
            block = self._take(self._idle.at(0))
            size = min(nbytes, block.size)
            block.size -= size
            start = block.address + block.size
            self.device.unmap(start, size)
            self.device.unreserve(start, size)
            self.log_exchange("segment_unmap", start, size, block.stream)
            nbytes -= size
            if block.size:
                self._put(block)


class _SmallBlocks(Allocator):
    """Small blocks on the owner's device, by the rules of PyTorch's caching allocator with its default settings.

    Its segments count among the owner's.
    """

    name = "chunked"
    config_type: ClassVar = ChunkedConfig

    def __init__(self, owner: Allocator) -> None:
        super().__init__(owner.config, capacity_bytes=owner.capacity_bytes)
        self.device = owner.device
        self._owner = owner

    def find(self, nbytes: int, stream: int) -> PoolBlock | None:
        """Return a block of at least `nbytes`, or None."""
        size = round_up(nbytes, MIN_BLOCK_BYTES)
        small = size <= SMALL_BYTES
        block = self._first(small, stream, size)
        if block is not None and (block.pool, block.stream) == (small, stream):
            self._take(block)
        elif (block := self._grown(size, stream, small=small)) is None:
            return None
        least = MIN_BLOCK_BYTES if small else SMALL_BYTES + 1
        return self._cut_off(block, size) if block.size - size >= least else block

    def give_back(self, block: PoolBlock) -> None:
        """Free `block`."""
        self._return_block(block)

    def release(self) -> None:
        """Give segments without live blocks back, the large ones first."""
        for small in (False, True):
            for idle in [block for block in self._idle if not block.split and block.pool == small]:
                self._segment_free(self._take(idle))

    def idle(self) -> Iterator[PoolBlock]:
        """Yield the free blocks."""
        return self._idle_blocks()

    def log_exchange(self, action: SegmentAction, address: int, nbytes: int, stream: int) -> None:
        self._owner.log_exchange(action, address, nbytes, stream)

    def _key(self, block: PoolBlock) -> Key:
        return block.pool, block.stream, block.size, block.address

    def _grown(self, size: int, stream: int, *, small: bool) -> PoolBlock | None:
        """Return a new segment; if the device has no memory, after releasing all cached ones."""
        nbytes = LARGE_SEGMENT_BYTES if size < MIN_LARGE_SEGMENT_BYTES else round_up(size, PAGE_BYTES)
        nbytes = SMALL_SEGMENT_BYTES if small else nbytes
        block = self._segment_malloc(nbytes, stream)
        if block is None:
            self._owner.empty_cache()
            self.retries += 1
            block = self._segment_malloc(nbytes, stream)
        if block is not None:
            block.pool = small
        return block
