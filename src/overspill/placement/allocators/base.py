"""The allocator interface: addresses over a simulated device, with statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from overspill.core import Mobility
from overspill.core.errors import InvalidLayout, OutOfMemory, RequestError
from overspill.core.units import format_bytes

NOWHERE = 0
"""The address of an empty block; every framework gives a null pointer for it."""

SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
SEGMENT_ACTIONS: tuple[SegmentAction, ...] = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
"""The actions by their number in a segment table."""
GAINS = ("segment_alloc", "segment_map")


class SegmentEvent(NamedTuple):
    """One exchange of memory with the device, at event `at`. Actions have PyTorch's names."""

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
    """A read-only view of a segment.

    `mapped_bytes` is less than `nbytes` only for expandable segments.
    """

    address: int
    nbytes: int
    mapped_bytes: int
    stream: int
    blocks: tuple[BlockView, ...]


class Allocator(ABC):
    """A framework's allocator over a simulated device.

    The device has `capacity_bytes` (None: unlimited). Allocators in Python and native ones are the two kinds. `clock`
    numbers the calls; the log and the peaks refer to it.
    """

    name: str
    capacity_bytes: int | None
    clock: int
    coalesces: bool = True
    """Whether free neighbours are always joined."""

    def allocate(self, nbytes: int, stream: int = 0, mobility: int = Mobility.MOVABLE) -> int:
        """The address of a block of at least `nbytes` on `stream`.

        NOWHERE for no bytes. `mobility` is a hint for allocators that group blocks; the others ignore it. Raises
        OutOfMemory.
        """
        if nbytes < 0:
            raise RequestError(f"cannot allocate {nbytes} bytes")
        at = self.clock
        address = self._place(nbytes, stream, mobility) if nbytes else NOWHERE
        if address is None:
            raise self._out_of_memory(nbytes)
        self.clock = at + 1
        return address

    def free(self, address: int) -> None:
        """Free the block at `address`. Raises RequestError when none is allocated there."""
        if address != NOWHERE and not self._take_back(address):
            raise RequestError(f"nothing is allocated at address {address:#x}: it was freed before, or never given out")
        self.clock += 1

    def empty_cache(self) -> None:
        """Give all memory without live blocks back to the device; most allocators never do."""
        return

    @property
    @abstractmethod
    def requested(self) -> Gauge:
        """Bytes of live blocks as requested."""

    @property
    @abstractmethod
    def allocated(self) -> Gauge:
        """Bytes of live blocks as given, after rounding."""

    @property
    @abstractmethod
    def reserved(self) -> Gauge:
        """Bytes that the allocator holds of the device."""

    @property
    @abstractmethod
    def retries(self) -> int:
        """How often cached memory was released to make room."""

    @property
    @abstractmethod
    def segment_log(self) -> Sequence[SegmentEvent]:
        """All exchanges of memory with the device, in order."""

    @property
    @abstractmethod
    def device_used_bytes(self) -> int:
        """Bytes that the device has given out, in whole pages."""

    @property
    @abstractmethod
    def spread_bytes(self) -> int:
        """Bytes of all segments up to their last live blocks.

        Dymem's "used", Fig. 15. A pool that is filled from both ends counts all but the gap between them.
        """

    @abstractmethod
    def usable_bytes(self, request_bytes: int) -> int:
        """Bytes of free blocks of at least `request_bytes`. The sum of Dymem's eq. 1."""

    @abstractmethod
    def segments(self) -> tuple[SegmentView, ...]:
        """All segments with their blocks, by address."""

    @abstractmethod
    def live_addresses(self) -> list[int]:
        """Addresses allocated and not freed."""

    @abstractmethod
    def _place(self, nbytes: int, stream: int, mobility: int) -> int | None:
        """The address of a new block of at least `nbytes`; None without room. Never 0."""

    @abstractmethod
    def _take_back(self, address: int) -> bool:
        """Free the block at `address`; False if none was live."""

    @abstractmethod
    def _idle_count(self) -> int:
        """The number of blocks in the free indexes."""

    def check_integrity(self) -> None:
        """Raise InvalidLayout with the failed equation unless books and blocks agree."""
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
        if self.reserved.now > self.device_used_bytes:
            raise InvalidLayout(f"{self.name}: reserved {self.reserved.now} > used on device {self.device_used_bytes}")
        # Segments do not overlap, and are full of blocks.
        for segment, following in pairwise(segments):
            if segment.address + segment.nbytes > following.address:
                raise InvalidLayout(f"{self.name}: segments at {segment.address} and {following.address} overlap")
        for segment in segments:
            self._check_segment(segment)

    def _check_segment(self, segment: SegmentView) -> None:
        end = segment.address
        before = ""
        for block in segment.blocks:
            self._equal("start of block", block.address, "end of the one before", end)
            if block.nbytes <= 0 or (block.state == "live" and block.requested_bytes > block.nbytes):
                raise InvalidLayout(
                    f"{self.name}: {block.requested_bytes} bytes asked for in a block of {block.nbytes}"
                )
            if self.coalesces and block.state == before != "live":
                raise InvalidLayout(f"{self.name}: two {before} neighbours meet at {block.address}")
            before = block.state
            end += block.nbytes

    def _equal(self, left: str, left_value: object, right: str, right_value: object) -> None:
        if left_value != right_value:
            raise InvalidLayout(f"{self.name}: {left} {left_value} != {right} {right_value}")

    def _out_of_memory(self, nbytes: int) -> OutOfMemory:
        capacity, reserved = self.capacity_bytes, self.reserved.now
        size = f"device of {format_bytes(capacity)}" if capacity is not None else "address space"
        message = (
            f"the {self.name} allocator finds no room for {format_bytes(nbytes)}: of the {size} it holds"
            f" {format_bytes(reserved)}, of which {format_bytes(reserved - self.allocated.now)} is free but in pieces"
            " too small or of another stream"
        )
        return OutOfMemory(message, requested_bytes=nbytes, reserved_bytes=reserved, capacity_bytes=capacity)


def config_or_default(name: str, config_type: type[Any], config: Any) -> Any:
    """`config`, or the default for None. Raises RequestError when it belongs to another allocator."""
    if config is not None and not isinstance(config, config_type):
        raise RequestError(f"the {name} allocator takes a {config_type.__name__}, not a {type(config).__name__}")
    return config_type() if config is None else config
