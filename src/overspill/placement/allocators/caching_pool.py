"""What PyTorch's caching allocator and its expandable segments share: a pool, and what the segments ask of its owner."""

from __future__ import annotations

from typing import Protocol

from overspill.placement.simulated_device import SimulatedDevice

from .base import SegmentAction
from .blocks import FreeBlocks, Key, PoolBlock


class Pool:
    """The free blocks of one kind, small or large; with expandable segments also the address space yet without memory.

    `searches` is the clock by which garbage collection measures age.
    """

    def __init__(self, *, small: bool, page_bytes: int) -> None:
        self.small = small
        self.page_bytes = page_bytes
        self.free = FreeBlocks()
        self.unmapped = FreeBlocks()
        self.searches = 0


class PoolOwner(Protocol):
    """The allocator to which pools and expandable segments belong."""

    device: SimulatedDevice

    def birth(self) -> int:
        """The number of a new block."""

    def key(self, block: PoolBlock) -> Key:
        """Where `block` belongs among the free ones."""

    def put(self, block: PoolBlock) -> None:
        """Put `block` among the free ones of its pool."""

    def join(self, block: PoolBlock, other: PoolBlock | None) -> None:
        """Let `block` take over its neighbour `other` if that is idle and of the same kind."""

    def log_exchange(self, action: SegmentAction, address: int, nbytes: int, stream: int) -> None:
        """Record an exchange with the device and count it."""
