"""The pool shared by PyTorch's caching allocator and its expandable segments."""

from __future__ import annotations

from typing import Protocol

from overspill.placement.allocators.base import SegmentAction
from overspill.placement.allocators.blocks import FreeBlocks, Key, PoolBlock
from overspill.placement.simulated_device import SimulatedDevice


class CachingPool:
    """Free blocks of one kind, small or large.

    With expandable segments also the address space yet without memory. `searches` is the clock by which garbage
    collection measures age.
    """

    def __init__(self, *, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.free = FreeBlocks()
        self.unmapped = FreeBlocks()
        self.searches = 0


class PoolOwner(Protocol):
    """The allocator that owns pools and expandable segments."""

    device: SimulatedDevice

    def birth(self) -> int:
        """A number for a new block."""

    def key(self, block: PoolBlock) -> Key:
        """The sort key of a free block."""

    def put(self, block: PoolBlock) -> None:
        """Put `block` among the free ones of its pool."""

    def join(self, block: PoolBlock, other: PoolBlock | None) -> None:
        """Merge the free neighbour `other` into `block`. Only one of the same kind."""

    def log_exchange(self, action: SegmentAction, address: int, nbytes: int, stream: int) -> None:
        """Log and count an exchange with the device."""
