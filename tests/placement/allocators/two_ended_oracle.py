"""The oracle of native/allocators/two_ended.hpp, for blocks of known mobility: the same rules in Python.

An incremental space outside the pool takes the blocks that do not fit in it.

    main space  | movable | hole | movable |      gap      | temporary | hole | temporary |
                ^low end: best fit upwards                      best fit downwards: high end^

Rules: Dymem §3.3 (Yang and Cheng, HPDC'20), Algorithm 3 and Fig. 11. The trace has the mobility of each block.
"""

from __future__ import annotations

from typing import ClassVar

from overspill.core import Mobility
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.blocks import Key, PoolBlock
from overspill.placement.allocators.two_ended import FIRST_POOL_BYTES, STEP_BYTES, TwoEndedConfig
from overspill.placement.simulated_device import PAGE_BYTES, round_up

LOW, GAP, HIGH, OUTSIDE = range(4)
"""A block's region: an end of the main space, the gap between, or the incremental space."""
FIRST_POOL_SHARE = 10, 12


class TwoEndedAllocator(Allocator):
    """Movable blocks from the low end, temporary ones from the high end.

    Reclaimed ones get segments of their own. Each end serves itself by best fit from its own holes, then from the gap.
    Only when both are full it uses the other end's holes, since the guarantee is "soft". The incremental space is
    cudaMalloc's, and blocks freed there return to the device. A reclaimed block that does not fit the device goes to
    the low end.
    """

    name = "gtbm"
    summary: ClassVar = "Dymem's pool with two ends, blocks grouped by mobility (GTBM)"
    source: ClassVar = "Dymem (Yang and Cheng, HPDC'20, doi:10.1145/3369583.3392684), section 3.3, Algorithm 3"
    config_type: ClassVar = TwoEndedConfig
    by_references: ClassVar = True
    config: TwoEndedConfig

    def __init__(self, config: TwoEndedConfig | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes=capacity_bytes)
        self._opened = False

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        return self._find_grouped_block(nbytes, stream, Mobility.MOVABLE)

    def _find_grouped_block(self, nbytes: int, stream: int, mobility: int) -> PoolBlock | None:
        if not self._opened:
            self._open(stream)
        size = round_up(nbytes, STEP_BYTES)
        if mobility == Mobility.RECLAIMED:
            return self._outside(size, stream) or self._inside(size, LOW)
        block = self._inside(size, HIGH if mobility == Mobility.TEMPORARY else LOW)
        if block is None and self.config.grows:
            block = self._outside(size, stream)
        return block

    def _return_block(self, block: PoolBlock) -> None:
        if block.pool == OUTSIDE:
            self._segment_free(block)
        else:
            super()._return_block(block)

    @property
    def spread_bytes(self) -> int:
        """Bytes used from both ends of the main space, and the incremental space."""
        gap = self._first(GAP)
        return self.reserved.now - (gap.size if gap is not None and gap.pool == GAP else 0)

    def _open(self, stream: int) -> None:
        """Reserve the main space: the configured size, or all memory of the device."""
        self._opened = True
        capacity, wanted = self.device.capacity_bytes, self.config.pool_bytes
        if wanted is None:
            few, many = FIRST_POOL_SHARE
            wanted = FIRST_POOL_BYTES if capacity is None else capacity * few // many
        size = round_up(wanted, STEP_BYTES)
        pool = self._segment_malloc(size, stream) if size else None
        if pool is None and capacity is not None:
            left = (capacity - self.device.used_bytes) // PAGE_BYTES * PAGE_BYTES
            pool = self._segment_malloc(left, stream) if left else None
        if pool is not None:
            self._put(pool)

    def _outside(self, size: int, stream: int) -> PoolBlock | None:
        block = self._segment_malloc(size, stream)
        if block is not None:
            block.pool = OUTSIDE
        return block

    def _inside(self, size: int, end: int) -> PoolBlock | None:
        """Return a block of `size` bytes from one end, or from another part of the main space."""
        for arena in (end, GAP, HIGH if end == LOW else LOW):
            block = self._first(arena, size)
            if block is not None and block.pool == arena:
                return self._cut(self._take(block), size, end if arena == GAP else arena)
        return None

    def _cut(self, hole: PoolBlock, size: int, end: int) -> PoolBlock:
        """Cut `size` bytes from a free block on the side of `end`, and leave the rest free."""
        if hole.size == size:
            hole.pool = end
            return hole
        front = hole.cut(size if end == LOW else hole.size - size)
        taken, rest = (front, hole) if end == LOW else (hole, front)
        taken.pool, taken.free = end, False
        self._put(rest)
        return taken

    def _put(self, block: PoolBlock) -> None:
        """Add `block` to the holes of its end, or as the gap. Its neighbours are live."""
        if block.next is not None and block.next.pool == LOW:
            block.pool = LOW
        elif block.prev is not None and block.prev.pool == HIGH:
            block.pool = HIGH
        else:
            block.pool = GAP
        super()._put(block)

    def _key(self, block: PoolBlock) -> Key:
        # Among equals the one that is further from the gap is the first.
        return (block.pool, block.size, -block.address if block.pool == HIGH else block.address)
