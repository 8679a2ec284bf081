"""The binary buddy system: blocks of powers of two, halved and joined with the half they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import PoolBlock
from overspill.placement.simulated_device import PAGE_BYTES


@dataclass(frozen=True)
class BuddyConfig:
    """The least sizes of blocks and segments, powers of two."""

    least_bytes: int = 512
    segment_bytes: int = PAGE_BYTES
    """The least size of a segment; a larger request gets a larger one."""

    def __post_init__(self) -> None:
        for name in ("least_bytes", "segment_bytes"):
            nbytes = getattr(self, name)
            if nbytes < 1 or nbytes & (nbytes - 1):
                raise RequestError(f"{name} must be a power of 2, not {nbytes}")
        if self.least_bytes > self.segment_bytes:
            raise RequestError(f"least_bytes {self.least_bytes} must not be above segment_bytes {self.segment_bytes}")


class BuddyAllocator(Allocator):
    """A buddy allocator: the smallest free block, the lowest among equals, halved until it fits.

    A block joins its buddy, whose address within the segment differs in the bit of their size, when both are free. It
    never frees memory to the device.
    """

    name = "buddy"
    summary: ClassVar = "the binary buddy system, powers of two"
    source: ClassVar = "K. C. Knowlton, A fast storage allocator, CACM 8(10), 1965"
    config_type: ClassVar = BuddyConfig
    config: BuddyConfig
    coalesces = False  # free neighbours that are no buddies stay apart

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = max(self.config.least_bytes, 1 << (nbytes - 1).bit_length())
        # The smallest free block, or a new segment.
        if (block := self._first(size)) is not None:
            self._take(block)
        else:
            new = self._segment_malloc(max(size, self.config.segment_bytes), stream)
            if new is None:
                return None
            block = new
            block.base = block.address
        # Halve it; the upper halves are free.
        while block.size > size:
            front = block.cut(block.size // 2)
            self._put(block)
            block = front
        return block

    def _return_block(self, block: PoolBlock) -> None:
        while True:
            is_front = not (block.address - block.base) & block.size
            buddy = block.next if is_front else block.prev
            if buddy is None or not buddy.free or buddy.size != block.size:
                break
            block.absorb(self._take(buddy))
        self._put(block)
