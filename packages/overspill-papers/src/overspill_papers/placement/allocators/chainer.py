"""Chainer's memory pool, today CuPy's: bins of 512 bytes a stream, always split, joined when freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.simulated_device import round_up

STEP_BYTES = 512
"""ALLOCATION_UNIT_SIZE of cupy/cuda/memory.pyx (cupy 005d7598)."""


@dataclass(frozen=True)
class ChainerConfig:
    """The pool's limit, CUPY_GPU_MEMORY_LIMIT."""

    limit_bytes: int = 0
    """Beyond it the pool fails without freeing blocks (0: none)."""

    def __post_init__(self) -> None:
        if self.limit_bytes < 0:
            raise RequestError(f"limit_bytes must not be negative, not {self.limit_bytes}")


class ChainerAllocator(Allocator):
    """CuPy's SingleDeviceMemoryPool.

    Blocks of one size share a bin. CuPy takes any of them; Chainer's pool took the one freed last, as this one does.
    """

    name = "chainer"
    summary: ClassVar = "the memory pool of Chainer and CuPy"
    source: ClassVar = "cupy/cuda/memory.pyx, cupy 005d7598"
    config_type: ClassVar = ChainerConfig
    config: ChainerConfig

    def __init__(self, config: ChainerConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._frees = 0

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = round_up(nbytes, STEP_BYTES)
        block = self._find(size, stream)
        if block is not None:
            return block
        if self.config.limit_bytes and self.reserved.now + size > self.config.limit_bytes:
            return None
        block = self._segment_malloc(size, stream)
        if block is None:
            self._release_unsplit()
            self.retries += 1
            block = self._segment_malloc(size, stream)
        return block

    def _find(self, size: int, stream: int) -> PoolBlock | None:
        """Return the last freed block of the stream's first bin that fits. All beyond `size` returns to the bins."""
        block = self._first(stream, size)
        return None if block is None or block.stream != stream else self._cut_off(self._take(block), size)

    def _put(self, block: PoolBlock) -> None:
        self._frees += 1
        block.indexed_at = self._frees
        super()._put(block)

    def _key(self, block: PoolBlock) -> Key:
        return (block.stream, block.size, -block.indexed_at)

    def _release_unsplit(self) -> None:
        """Free all segments without live blocks (free_all_blocks)."""
        for block in list(self._idle):
            if not block.split:
                self._segment_free(self._take(block))
