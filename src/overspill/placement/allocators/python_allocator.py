"""Base of the Python allocators, each the readable oracle of a native one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES, SimulatedDevice

from .base import GAINS, Allocator, BlockView, Gauge, SegmentAction, SegmentEvent, SegmentView, config_or_default
from .blocks import FreeBlocks, Key, PoolBlock
from .result import Replay


class PythonAllocator(Allocator):
    """An allocator in Python.

    Subclasses find blocks in `_find_block`. Free ones are in one index, `_idle`, in the order of their `_key`s.
    """

    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    config_type: ClassVar[type[Any]]
    by_references: ClassVar[bool] = False
    """Whether its paper orders blocks as `Events.of(…, by_references=True)`."""

    def __init__(self, config: Any = None, *, capacity_bytes: int | None = None) -> None:
        self.config: Any = config_or_default(self.name, self.config_type, config)
        self.device = SimulatedDevice(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.clock = 0
        self._requested, self._allocated, self._reserved = Gauge(), Gauge(), Gauge()
        self._retries = 0
        self._log: list[SegmentEvent] = []
        self._live: dict[int, PoolBlock] = {}
        self._idle = FreeBlocks()

    @abstractmethod
    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        """A block of at least `nbytes`, taken out of the free indexes, or None. None when all attempts failed."""

    def _find_grouped_block(self, nbytes: int, stream: int, mobility: int) -> PoolBlock | None:  # noqa: ARG002
        """As `_find_block`, for allocators that group blocks by `mobility`."""
        return self._find_block(nbytes, stream)

    def _return_block(self, block: PoolBlock) -> None:
        """Put `block` into the index, joined with its free neighbours."""
        for other in (block.prev, block.next):
            if other is not None and other.free:
                self._take(other)
                block.absorb(other)
        self._put(block)

    def _idle_blocks(self) -> Iterator[PoolBlock]:
        """All free blocks."""
        return iter(self._idle)

    def _key(self, block: PoolBlock) -> Key:
        """The place of a free block in the index: by size, then by address."""
        return block.size, block.address

    def _put(self, block: PoolBlock) -> None:
        self._idle.add(self._key(block), block)

    def _take(self, block: PoolBlock) -> PoolBlock:
        return self._idle.remove(self._key(block))

    def _first(self, *least: int) -> PoolBlock | None:
        """The first free block whose key is at least `least`, or None."""
        position = self._idle.position(least)
        return self._idle.at(position) if position < len(self._idle) else None

    def _cut_off(self, block: PoolBlock, size: int) -> PoolBlock:
        """The first `size` bytes of a block that was taken out; the rest of it is free."""
        if block.size == size:
            return block
        front = block.cut(size)
        self._put(block)
        return front

    @classmethod
    def settled(cls, config: Any, trial: Callable[[Any], Replay]) -> Any:  # noqa: ARG003
        """`config` with what the allocator learns from a first run.

        `trial` makes that run under a configuration.
        """
        return config

    def _place(self, nbytes: int, stream: int, mobility: int) -> int | None:
        block = self._find_grouped_block(nbytes, stream, mobility) if nbytes <= ADDRESS_SPACE_BYTES else None
        if block is None:
            return None
        block.free, block.requested = False, nbytes
        self._live[block.address] = block
        self._requested.add(nbytes, self.clock)
        self._allocated.add(block.size, self.clock)
        return block.address

    def _take_back(self, address: int) -> bool:
        block = self._live.pop(address, None)
        if block is None:
            return False
        self._requested.add(-block.requested, self.clock)
        self._allocated.add(-block.size, self.clock)
        block.free, block.requested = True, 0
        self._return_block(block)
        return True

    def _segment_malloc(self, nbytes: int, stream: int) -> PoolBlock | None:
        """A new segment of `nbytes` as one block; None if the device is full."""
        address = self.device.malloc(nbytes)
        if address is None:
            return None
        self.log_exchange("segment_alloc", address, nbytes, stream)
        return PoolBlock(address, nbytes, stream)

    def _segment_free(self, block: PoolBlock) -> None:
        """Give a whole segment back to the device."""
        self.device.free(block.address)
        self.log_exchange("segment_free", block.address, block.size, block.stream)

    def log_exchange(self, action: SegmentAction, address: int, nbytes: int, stream: int) -> None:
        """Log and count an exchange with the device."""
        self._reserved.add(nbytes if action in GAINS else -nbytes, self.clock)
        self._log.append(SegmentEvent(self.clock, action, address, nbytes, stream))

    @property
    def requested(self) -> Gauge:
        return self._requested

    @property
    def allocated(self) -> Gauge:
        return self._allocated

    @property
    def reserved(self) -> Gauge:
        return self._reserved

    @property
    def retries(self) -> int:
        return self._retries

    @property
    def segment_log(self) -> list[SegmentEvent]:
        return self._log

    @property
    def device_used_bytes(self) -> int:
        return self.device.used_bytes

    @property
    def spread_bytes(self) -> int:
        return self._reserved.now - sum(block.size for block in self._idle_blocks() if block.mapped and block.last)

    def usable_bytes(self, request_bytes: int) -> int:
        if request_bytes <= 1:
            return self._reserved.now - self._allocated.now
        return sum(block.size for block in self._idle_blocks() if block.mapped and block.size >= request_bytes)

    def live_addresses(self) -> list[int]:
        return list(self._live)

    def _idle_count(self) -> int:
        return sum(1 for _ in self._idle_blocks())

    def segments(self) -> tuple[SegmentView, ...]:
        found: list[SegmentView] = []
        for block in sorted((*self._live.values(), *self._idle_blocks()), key=lambda b: b.address):
            if block.prev is not None:
                continue
            # A segment is the chain of blocks from its first one.
            chain = [block]
            while (following := chain[-1].next) is not None:
                chain.append(following)
            views = tuple(
                BlockView(b.address, b.size, b.requested, "unmapped" if not b.mapped else "free" if b.free else "live")
                for b in chain
            )
            mapped = sum(b.size for b in chain if b.mapped)
            found.append(SegmentView(block.address, sum(b.size for b in chain), mapped, block.stream, views))
        return tuple(found)
