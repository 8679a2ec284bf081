"""Best fit in one pool that grows at its end: a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES, PAGE_BYTES, round_up

UNLIMITED_RESERVATION_BYTES = 1 << 46
"""Address space of the pool on an unlimited device."""


@dataclass(frozen=True)
class BestFitConfig:
    """Sizes are rounded up to `step_bytes`."""

    step_bytes: int = 512

    def __post_init__(self) -> None:
        if self.step_bytes < 1:
            raise RequestError(f"step_bytes must be positive, not {self.step_bytes}")


class BestFitAllocator(Allocator):
    """The smallest hole that fits, lowest among equals, otherwise the pool's end.

    At the end pages are added. CNMeM's pool grows by separate segments, whose blocks never join. Here all addresses are
    in one range, and the reserved bytes reach to the highest used address. It never frees memory to the device.
    """

    name = "best-fit"
    summary: ClassVar = "best fit with coalescing in one pool that grows at its end"
    source: ClassVar = "Knuth, The Art of Computer Programming 1, section 2.5"
    config_type: ClassVar = BestFitConfig
    config: BestFitConfig

    def __init__(self, config: BestFitConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        limit = UNLIMITED_RESERVATION_BYTES if capacity_bytes is None else round_up(capacity_bytes, PAGE_BYTES)
        self._unmapped_bytes = limit
        self._last: PoolBlock | None = None

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        size = round_up(nbytes, self.config.step_bytes)
        block = self._first(size)
        if block is None or block.size < size:
            block = self._grown(size, stream)
            if block is None:
                return None
        return self._cut_off(self._take(block), size)

    def _return_block(self, block: PoolBlock) -> None:
        if self._last is not None and self._last is block.next and self._last.free:
            self._last = block
        super()._return_block(block)

    def _key(self, block: PoolBlock) -> Key:
        # The end of the pool can grow: it comes after all holes.
        return (block.size if block.next is not None else ADDRESS_SPACE_BYTES, block.address)

    def _grown(self, size: int, stream: int) -> PoolBlock | None:
        """Return the pool's last block, grown to at least `size` free bytes; None without memory."""
        last = self._last
        open_bytes = last.size if last is not None and last.free else 0
        # The free end of the pool counts; pages are added for the rest.
        missing = round_up(size - open_bytes, PAGE_BYTES)
        if missing > self._unmapped_bytes:
            return None
        end = self.device.reserve(self._unmapped_bytes) if last is None else last.address + last.size
        if end is None:
            return None
        # Map the missing pages behind the last block, and join them to it if it is free.
        if not self.device.map(end, missing):
            if last is None:
                self.device.unreserve(end, self._unmapped_bytes)
            return None
        self._unmapped_bytes -= missing
        self.log_exchange("segment_map", end, missing, stream)
        if last is not None and last.free:
            self._take(last)
            last.size += missing
        else:
            self._last = PoolBlock(end, missing, stream, prev=last)
            if last is not None:
                last.next = self._last
        assert self._last is not None
        self._put(self._last)
        return self._last
