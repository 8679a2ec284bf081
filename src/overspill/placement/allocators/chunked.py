"""Virtual addressing by chunks: each block has addresses of its own, with equal chunks of physical memory behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.simulated_device import PAGE_BYTES, round_up

from .blocks import FreeBlocks, PoolBlock
from .python_allocator import PythonAllocator


@dataclass(frozen=True)
class ChunkedConfig:
    """`chunk_bytes` is the size of a physical chunk, a multiple of the driver's 2 MiB; the paper takes 40 MB.

    A smaller chunk wastes less (eq. 1), a larger one is mapped in fewer calls.
    """

    chunk_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.chunk_bytes % PAGE_BYTES:
            raise RequestError(f"chunk_bytes must be a multiple of {PAGE_BYTES}, not {self.chunk_bytes}")


class ChunkedAllocator(PythonAllocator):
    """Chunks behind consecutive virtual addresses, kept for later requests when a block is freed.

    Any chunks serve any request, so it finds room as long as enough of them are free or the device has more: there is
    no external fragmentation. Chunks are kept at the addresses that they were freed at: a block of as many takes them
    there, and another unmaps those of the smallest such block first. It never gives memory back.
    """

    name = "chunked"
    summary: ClassVar = "chunks of memory mapped behind consecutive addresses, no external fragmentation"
    source: ClassVar = "Out-of-core training ... with adaptive window-based scheduling, section 4"
    config_type: ClassVar = ChunkedConfig
    config: ChunkedConfig

    def __init__(self, config: ChunkedConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._idle = FreeBlocks()

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = round_up(nbytes, self.config.chunk_bytes)
        position = self._idle.position((size,))
        if position < len(self._idle) and self._idle.at(position).size == size:
            return self._idle.remove((size, self._idle.at(position).address))
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
        self._idle.add((block.size, block.address), block)

    def _idle_blocks(self) -> Iterator[PoolBlock]:
        return iter(self._idle)

    def usable_bytes(self, request_bytes: int) -> int:
        """All chunks that are kept, if they are enough together: they can be combined."""
        return self._kept_bytes if self._kept_bytes >= request_bytes else 0

    @property
    def _kept_bytes(self) -> int:
        return self._reserved.now - self._allocated.now

    def _unmap(self, nbytes: int) -> None:
        """Take `nbytes` of kept chunks, with the addresses before them, out of the smallest free blocks."""
        while nbytes:
            block = self._idle.at(0)
            self._idle.remove((block.size, block.address))
            size = min(nbytes, block.size)
            block.size -= size
            start = block.address + block.size
            self.device.unmap(start, size)
            self.device.unreserve(start, size)
            self.log_exchange("segment_unmap", start, size, block.stream)
            nbytes -= size
            if block.size:
                self._idle.add((block.size, block.address), block)


def internal_fragmentation_bound(live_blocks: int, config: ChunkedConfig | None = None) -> int:
    """The most bytes that `live_blocks` blocks at once, N_max, can waste in their last chunks.

    A block of m_r bytes takes k = ceil(m_r / m_c) chunks of m_c bytes and wastes k m_c - m_r < m_c (eq. 1), so that all
    waste less than N_max m_c (eq. 2): in whole bytes, N_max (m_c - 1) at most.
    """
    return live_blocks * ((config or ChunkedConfig()).chunk_bytes - 1)
