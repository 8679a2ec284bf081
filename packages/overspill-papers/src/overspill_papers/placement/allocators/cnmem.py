"""NVIDIA's CNMeM, the pool of vDNN: best fit in one pool reserved at the start, growing if allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import PoolBlock
from overspill.placement.allocators.two_ended import STEP_BYTES
from overspill.placement.simulated_device import round_up


@dataclass(frozen=True)
class CnmemConfig:
    """`pool_bytes` are reserved by the first allocation; `grows` is the absence of CNMEM_FLAGS_CANNOT_GROW."""

    pool_bytes: int = 0
    grows: bool = True

    def __post_init__(self) -> None:
        if self.pool_bytes < 0:
            raise RequestError(f"pool_bytes must not be negative, not {self.pool_bytes}")
        if not self.pool_bytes and not self.grows:
            raise RequestError("a cnmem pool of no bytes that does not grow serves nothing: give pool_bytes")


class CnmemAllocator(Allocator):
    """CNMeM's root manager, for all streams that are not registered.

    It never frees memory to the device.
    """

    name = "cnmem"
    summary: ClassVar = "NVIDIA's CNMeM: best fit in one pool"
    source: ClassVar = "src/cnmem.cpp, NVIDIA/cnmem 09c27531"
    config_type: ClassVar = CnmemConfig
    config: CnmemConfig

    def __init__(self, config: CnmemConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._pool_bytes_missing = round_up(self.config.pool_bytes, STEP_BYTES)

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        if self._pool_bytes_missing:
            pool = self._segment_malloc(self._pool_bytes_missing, stream)
            if pool is None:
                return None
            self._pool_bytes_missing = 0
            self._put(pool)
        # Best fit, whose rest stays idle.
        size = round_up(nbytes, STEP_BYTES)
        block = self._first(size)
        if block is None:
            return self._segment_malloc(size, stream) if self.config.grows else None
        return self._cut_off(self._take(block), size)
