"""MXNet's pools: cudaMalloc for every size; freed blocks serve requests of the same rounded size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.simulated_device import round_up

# Constants of src/storage/pooled_storage_manager.h, MXNet 1.5.
LEAST_PAGE_BYTES = 32
LEAST_CUTOFF, LARGEST_CUTOFF = 20, 34


@dataclass(frozen=True)
class MxnetConfig:
    """Settings of MXNet's pools.

    They are MXNET_GPU_MEM_POOL_TYPE, …_PAGE_SIZE, …_ROUND_LINEAR_CUTOFF, …_RESERVE and
    MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE.
    """

    pool_type: Literal["naive", "round"] = "naive"
    page_bytes: int = 4096
    large_round_bytes: int = 2 << 20
    linear_cutoff: int = 24
    reserve_percent: int = 5
    """If less of the device would stay free, all kept blocks are freed first."""

    def __post_init__(self) -> None:
        if self.pool_type not in ("naive", "round"):
            raise RequestError(f"pool_type is 'naive' or 'round', not {self.pool_type!r}")
        if self.page_bytes < LEAST_PAGE_BYTES or self.page_bytes & (self.page_bytes - 1):
            raise RequestError(f"page_bytes must be a power of 2 of at least 32, not {self.page_bytes}")
        if self.large_round_bytes < 1:
            raise RequestError(f"large_round_bytes must be positive, not {self.large_round_bytes}")
        if not LEAST_CUTOFF <= self.linear_cutoff <= LARGEST_CUTOFF or self.page_bytes > 1 << self.linear_cutoff:
            raise RequestError(f"linear_cutoff must be from 20 to 34 and above the page, not {self.linear_cutoff}")
        if not 0 <= self.reserve_percent <= 100:
            raise RequestError(f"reserve_percent must be from 0 to 100, not {self.reserve_percent}")


class MxnetAllocator(Allocator):
    """MXNet's GPUPooledStorageManager ("naive") and GPUPooledRoundedStorageManager ("round"), without streams."""

    name = "mxnet"
    summary: ClassVar = "MXNet's pool of blocks by size, never split"
    source: ClassVar = "src/storage/pooled_storage_manager.h, MXNet 1.5"
    config_type: ClassVar = MxnetConfig
    config: MxnetConfig

    def __init__(self, config: MxnetConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._frees = 0

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = self._rounded(nbytes)
        block = self._first(size)
        if block is not None and block.size == size:
            return self._take(block)
        if self._scarce(size):
            self._release_all()
            self.retries += 1
        return self._segment_malloc(size, stream)

    def _return_block(self, block: PoolBlock) -> None:
        self._frees += 1
        block.indexed_at = self._frees
        self._put(block)

    def _key(self, block: PoolBlock) -> Key:
        return block.size, -block.indexed_at  # the latest of a size is taken first

    def _rounded(self, nbytes: int) -> int:
        """Return the size of a block for `nbytes`.

        It is a power of 2 and then a multiple of one, or a multiple of the page and then of 2 MiB.
        """
        config = self.config
        size = max(nbytes, config.page_bytes)
        if config.pool_type == "naive":
            return round_up(size, config.large_round_bytes) if size > config.large_round_bytes else size
        if size > 1 << config.linear_cutoff:
            return round_up(size, 1 << config.linear_cutoff)
        return 1 << (size - 1).bit_length()

    def _scarce(self, size: int) -> bool:
        """Return whether a new block of `size` bytes would touch the reserve."""
        total = self.device.capacity_bytes
        if total is None:
            return False
        spare = total - self.device.used_bytes
        reserve = total * self.config.reserve_percent // 100
        return spare <= reserve or size > spare - reserve

    def _release_all(self) -> None:
        for block in list(self._idle):
            self._segment_free(self._take(block))
