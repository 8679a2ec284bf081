"""TensorFlow's best-fit allocator with coalescing (BFC): a few growing regions, loose splits, no streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import PoolBlock
from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES, round_up

# Constants of xla/tsl/framework/bfc_allocator.{h,cc}, openxla 00df9eef.
STEP_BYTES = 256
FIRST_REGION_BYTES = 2 << 20
MOST_WASTE_BYTES = 128 << 20
BACKPEDAL = np.float32(0.9)


@dataclass(frozen=True)
class BfcConfig:
    """Settings of TensorFlow's allocator."""

    allow_growth: bool = True
    """False reserves the whole device at once, as TensorFlow does by default."""
    garbage_collection: bool = True
    """TF_ENABLE_GPU_GARBAGE_COLLECTION."""
    fragmentation_fraction: float = 0.0
    """The share of the device that may be wasted in one block (0: 128 MiB)."""

    def __post_init__(self) -> None:
        if not 0 <= self.fragmentation_fraction <= 1:
            raise RequestError(f"fragmentation_fraction must be from 0 to 1, not {self.fragmentation_fraction:g}")


class BfcAllocator(Allocator):
    """TensorFlow's BFCAllocator.

    Its bins are a shortcut to the best fit by size and address, which is implemented here.
    """

    name = "tensorflow"
    summary: ClassVar = "TensorFlow's best fit with coalescing (BFC)"
    source: ClassVar = "xla/tsl/framework/bfc_allocator.cc, openxla 00df9eef"
    config_type: ClassVar = BfcConfig
    config: BfcConfig

    def __init__(self, config: BfcConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        if capacity_bytes is None and not self.config.allow_growth:
            raise RequestError(
                "the tensorflow allocator without allow_growth takes the whole device: give its capacity"
            )
        self._limit = ADDRESS_SPACE_BYTES if capacity_bytes is None else capacity_bytes
        first = min(self._limit, FIRST_REGION_BYTES) if self.config.allow_growth else self._limit
        self._next_region = round_up(first, STEP_BYTES)
        fraction = self.config.fragmentation_fraction
        self._most_waste = max(1, int(fraction * float(self._limit))) if fraction > 0 else MOST_WASTE_BYTES

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = round_up(nbytes, STEP_BYTES)
        block = self._find(size)
        if block is None and self._extend(size, stream):
            block = self._find(size)
        if block is None and self._release_idle_regions(size):
            self.retries += 1
            if self._extend(size, stream):
                block = self._find(size)
        return block

    def _find(self, size: int) -> PoolBlock | None:
        """Return the smallest idle block that fits, the lowest among equals. A large enough remainder is split off."""
        block = self._first(size)
        if block is None:
            return None
        splits = block.size >= 2 * size or block.size - size >= self._most_waste
        return self._cut_off(self._take(block), size if splits else block.size)

    def _extend(self, size: int, stream: int) -> bool:
        """Return whether a new region of at least `size` bytes was reserved (Extend).

        The size of new regions doubles. If the device lacks memory, 0.9 times as much is tried, again and again.
        """
        available = (self._limit - self.reserved.now) // STEP_BYTES * STEP_BYTES
        if size > available:
            return False
        # Regions double, up to what is left.
        grown = size > self._next_region
        while size > self._next_region:
            self._next_region *= 2
        nbytes = min(self._next_region, available)
        block = self._segment_malloc(nbytes, stream)
        # Ask for less until the device has it.
        while block is None:
            less = round_up(int(np.float32(nbytes) * BACKPEDAL), STEP_BYTES)
            nbytes = less if less < nbytes else nbytes - STEP_BYTES
            if nbytes < size:
                return False
            block = self._segment_malloc(nbytes, stream)
        if not grown:
            self._next_region *= 2
        self._put(block)
        return True

    def _release_idle_regions(self, size: int) -> bool:
        """Return whether freeing regions without live blocks made `size` bytes available.

        It is DeallocateFreeRegions.
        """
        if not self.config.garbage_collection:
            return False
        regions = sorted((block for block in self._idle if not block.split), key=lambda block: block.address)
        idle = sum(block.size for block in regions)
        if idle == 0 or size > self._limit - self.reserved.now + idle:
            return False
        for block in regions:
            self._segment_free(self._take(block))
        return True
