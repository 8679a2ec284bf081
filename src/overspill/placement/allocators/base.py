"""The allocator interface: addresses over a simulated device, with statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

from overspill.core import Mobility
from overspill.core.errors import InvalidLayoutError, OutOfMemoryError, RequestError
from overspill.core.units import format_bytes
from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES, SimulatedDevice

from .blocks import FreeBlocks, Key, PoolBlock

NOWHERE = 0
"""The address of an empty block; every framework gives a null pointer for it."""

SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
SEGMENT_ACTIONS: tuple[SegmentAction, ...] = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
"""The actions by their number in a segment table."""
GAINS = ("segment_alloc", "segment_map")


class SegmentEvent(NamedTuple):
    """One exchange of memory with the device, at event `at`; actions have PyTorch's names."""

    at: int
    action: SegmentAction
    address: int
    nbytes: int
    stream: int


@dataclass(slots=True)
class Gauge:
    """A number of bytes with its first maximum, and that event."""

    now: int = 0
    peak: int = 0
    peak_at: int = -1

    def add(self, nbytes: int, at: int) -> None:
        """Change the number by `nbytes` at event `at`."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now
            self.peak_at = at


class BlockView(NamedTuple):
    """A read-only view of a block; `state` is "live", "free" or "unmapped"."""

    address: int
    nbytes: int
    requested_bytes: int
    state: str


class SegmentView(NamedTuple):
    """A read-only view of a segment."""

    address: int
    nbytes: int
    mapped_bytes: int
    """Less than `nbytes` only for expandable segments."""
    stream: int
    blocks: tuple[BlockView, ...]


class Allocator:
    """A framework's allocator over a simulated device.

    The device has `capacity_bytes` (None: unlimited). `clock` numbers the calls; the log and the peaks refer to it.
    Subclasses find blocks in `_find_block`, or are a NativeAllocator. Free blocks are in one index, `_idle`, in the
    order of their `_key`s.
    """

    name: ClassVar[str]
    coalesces: ClassVar[bool] = True
    """Whether free neighbours are always joined."""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    config_type: ClassVar[type[Any]]
    by_references: ClassVar[bool] = False
    """Whether its paper orders blocks as `Events.of(…, by_references=True)`."""

    learns_steps: ClassVar[int] = 0
    """Equal steps after which it serves each further one in the same way."""

    def __init__(self, config: Any = None, *, capacity_bytes: int | None = None) -> None:
        self.config: Any = config_or_default(self.name, self.config_type, config)
        self.device = SimulatedDevice(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.clock = 0
        self.requested, self.allocated, self.reserved = Gauge(), Gauge(), Gauge()
        """Bytes of live blocks as requested; as given, after rounding; and what the allocator holds of the device."""
        self.retries = 0
        """How often cached memory was released to make room."""
        self.segment_log: list[SegmentEvent] = []
        """All exchanges of memory with the device, in order."""
        self._live: dict[int, PoolBlock] = {}
        self._idle = FreeBlocks()

    def allocate(self, nbytes: int, stream: int = 0, mobility: int = Mobility.MOVABLE) -> int:
        """Return the address of a block of at least `nbytes` on `stream`; NOWHERE for no bytes.

        `mobility` is a hint for allocators that group blocks; the others ignore it. Raises OutOfMemoryError.
        """
        if nbytes < 0:
            raise RequestError(f"cannot allocate {nbytes} bytes")
        address = self._allocate(nbytes, stream, mobility) if nbytes else NOWHERE
        if address is None:
            raise self._out_of_memory(nbytes)
        self.clock += 1
        return address

    def free(self, address: int) -> None:
        """Free the block at `address`. Raises RequestError if none is allocated there."""
        if address != NOWHERE and not self._free(address):
            raise RequestError(f"nothing is allocated at address {address:#x}: it was freed before, or never given out")
        self.clock += 1

    def _allocate(self, nbytes: int, stream: int, mobility: int) -> int | None:
        """Return the address of a block of at least `nbytes`, or None."""
        block = self._find_grouped_block(nbytes, stream, mobility) if nbytes <= ADDRESS_SPACE_BYTES else None
        if block is None:
            return None
        block.free, block.requested = False, nbytes
        self._live[block.address] = block
        self.requested.add(nbytes, self.clock)
        self.allocated.add(block.size, self.clock)
        return block.address

    def _free(self, address: int) -> bool:
        """Free the block at `address`, and return whether one was allocated there."""
        block = self._live.pop(address, None)
        if block is None:
            return False
        self.requested.add(-block.requested, self.clock)
        self.allocated.add(-block.size, self.clock)
        block.free, block.requested = True, 0
        self._return_block(block)
        return True

    def empty_cache(self) -> None:
        """Give all memory without live blocks back to the device; most allocators never do."""
        return

    def _find_block(self, nbytes: int, stream: int) -> PoolBlock | None:
        """Return a block of at least `nbytes`, taken out of the free indexes, or None if all attempts failed."""
        raise NotImplementedError

    def _find_grouped_block(self, nbytes: int, stream: int, mobility: int) -> PoolBlock | None:  # noqa: ARG002
        """Return a block as `_find_block`, for allocators that group blocks by `mobility`."""
        return self._find_block(nbytes, stream)

    def _return_block(self, block: PoolBlock) -> None:
        """Put `block` into the index, joined with its free neighbours."""
        for other in (block.prev, block.next):
            if other is not None and other.free:
                self._take(other)
                block.absorb(other)
        self._put(block)

    def _idle_blocks(self) -> Iterator[PoolBlock]:
        """Yield all free blocks."""
        return iter(self._idle)

    def _key(self, block: PoolBlock) -> Key:
        """Return the place of a free block in the index: by size, then by address."""
        return block.size, block.address

    def _put(self, block: PoolBlock) -> None:
        self._idle.add(self._key(block), block)

    def _take(self, block: PoolBlock) -> PoolBlock:
        return self._idle.remove(self._key(block))

    def _first(self, *least: int) -> PoolBlock | None:
        """Return the first free block whose key is at least `least`, or None."""
        position = self._idle.position(least)
        return self._idle.at(position) if position < len(self._idle) else None

    def _cut_off(self, block: PoolBlock, size: int) -> PoolBlock:
        """Return the first `size` bytes of a block that was taken out; the rest of it is free."""
        if block.size == size:
            return block
        front = block.cut(size)
        self._put(block)
        return front

    @classmethod
    def settled(cls, config: Any, trial: Callable[[Any], Any]) -> Any:  # noqa: ARG003
        """Return `config` with what the allocator learns from a first run.

        `trial` makes that run under a configuration, and returns its Replay.
        """
        return config

    def _segment_malloc(self, nbytes: int, stream: int) -> PoolBlock | None:
        """Return a new segment of `nbytes` as one block; None if the device is full."""
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
        self.reserved.add(nbytes if action in GAINS else -nbytes, self.clock)
        self.segment_log.append(SegmentEvent(self.clock, action, address, nbytes, stream))

    @property
    def spread_bytes(self) -> int:
        """Bytes of all segments up to their last live blocks (Dymem's "used", Fig. 15).

        A pool that is filled from both ends counts all but the gap between them.
        """
        return self.reserved.now - sum(block.size for block in self._idle_blocks() if block.mapped and block.last)

    def usable_bytes(self, request_bytes: int) -> int:
        """Return the bytes of free blocks of at least `request_bytes`, the sum of Dymem's eq. 1."""
        if request_bytes <= 1:
            return self.reserved.now - self.allocated.now
        return sum(block.size for block in self._idle_blocks() if block.mapped and block.size >= request_bytes)

    def live_addresses(self) -> list[int]:
        """Return the addresses allocated and not freed."""
        return list(self._live)

    def segments(self) -> tuple[SegmentView, ...]:
        """Return all segments with their blocks, by address."""
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

    def check_integrity(self) -> None:
        """Raise InvalidLayoutError with the failed equation unless books and blocks agree."""
        segments = self.segments()
        blocks = [block for segment in segments for block in segment.blocks]
        live = [block for block in blocks if block.state == "live"]
        self._equal("blocks in segments", len(blocks), "live + idle", len(self.live_addresses()) + self._idle_count())
        self._equal("live addresses", sorted(b.address for b in live), "given out", sorted(self.live_addresses()))
        self._equal("sum of requests", sum(b.requested_bytes for b in live), "requested", self.requested.now)
        self._equal("sum of live blocks", sum(b.nbytes for b in live), "allocated", self.allocated.now)
        self._equal("sum of segments", sum(s.mapped_bytes for s in segments), "reserved", self.reserved.now)
        exchanged = sum(event.nbytes if event.action in GAINS else -event.nbytes for event in self.segment_log)
        self._equal("sum of the segment log", exchanged, "reserved", self.reserved.now)
        if self.reserved.now > (used := self._used_bytes()):
            raise InvalidLayoutError(f"{self.name}: reserved {self.reserved.now} > used on device {used}")
        # Segments do not overlap, and are full of blocks.
        for segment, following in pairwise(segments):
            if segment.address + segment.nbytes > following.address:
                raise InvalidLayoutError(f"{self.name}: segments at {segment.address} and {following.address} overlap")
        for segment in segments:
            self._check_segment(segment)

    def _idle_count(self) -> int:
        return sum(1 for _ in self._idle_blocks())

    def _used_bytes(self) -> int:
        return self.device.used_bytes

    def _check_segment(self, segment: SegmentView) -> None:
        end = segment.address
        before = ""
        for block in segment.blocks:
            self._equal("start of block", block.address, "end of the one before", end)
            if block.nbytes <= 0 or (block.state == "live" and block.requested_bytes > block.nbytes):
                raise InvalidLayoutError(
                    f"{self.name}: {block.requested_bytes} bytes asked for in a block of {block.nbytes}"
                )
            if self.coalesces and block.state == before != "live":
                raise InvalidLayoutError(f"{self.name}: two {before} neighbours meet at {block.address}")
            before = block.state
            end += block.nbytes

    def _equal(self, left: str, left_value: object, right: str, right_value: object) -> None:
        if left_value != right_value:
            raise InvalidLayoutError(f"{self.name}: {left} {left_value} != {right} {right_value}")

    def _out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        capacity, reserved = self.capacity_bytes, self.reserved.now
        size = f"device of {format_bytes(capacity)}" if capacity is not None else "address space"
        message = (
            f"the {self.name} allocator finds no room for {format_bytes(nbytes)}: of the {size} it holds"
            f" {format_bytes(reserved)}, of which {format_bytes(reserved - self.allocated.now)} is free but in pieces"
            " too small or of another stream"
        )
        return OutOfMemoryError(message, requested_bytes=nbytes, reserved_bytes=reserved, capacity_bytes=capacity)


def config_or_default(name: str, config_type: type[Any], config: Any) -> Any:
    """Return `config`, or the default for None. Raises RequestError if it belongs to another allocator."""
    if config is not None and not isinstance(config, config_type):
        raise RequestError(f"the {name} allocator takes a {config_type.__name__}, not a {type(config).__name__}")
    return config_type() if config is None else config
