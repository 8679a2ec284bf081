"""Device and allocator of a snapshot replay; the device answers as the real one did in the recording."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from overspill.placement.allocators.caching import SMALL_BYTES, CachingAllocator, round_size
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.allocators.native_allocator import BLOCK_STATES
from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES, PAGE_BYTES, SimulatedDevice

from .device_trace import LOSSES
from .read import TraceEntry
from .start import StartSegment

_ELSEWHERE = ADDRESS_SPACE_BYTES << 4
"""Addresses above all real ones, for memory that is not in the recording."""


class RecordedDevice(SimulatedDevice):
    """A device that answers with recorded addresses and failures.

    It has no free memory where the recording gave memory back or ran out of it. Exchanges that the recording does not
    have get memory at addresses of their own. Its attributes:

    - `expected`: the recorded exchanges of memory for the next allocation; `refuses`: whether that failed.
    - `exchanged`: how many exchanges were done.
    - `later_maps`: returns the addresses at which memory of its kind is mapped next.
    - `least_capacity_bytes`, `capacity_above_bytes`: bounds on the real device's capacity that follow from the
      answers. It has at least the first, and less than the second.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self.expected: Sequence[TraceEntry] = ()
        self.refuses = False
        self.least_capacity_bytes = 0
        self.capacity_above_bytes: int | None = None
        self.exchanged: Callable[[], int] = lambda: 0
        self.later_maps: Callable[[], Iterator[int]] = lambda: iter(())
        self._elsewhere = _ELSEWHERE
        self._held: list[tuple[int, int]] = []

    def malloc(self, nbytes: int) -> int | None:
        """Return the recorded address of a new segment; None if memory was short in the recording."""
        entry = self._next()
        if not self._has_room(entry, nbytes):
            return None
        recorded = entry is not None and (entry.action, entry.nbytes) == ("segment_alloc", nbytes)
        address = entry.address if entry is not None and recorded else None
        return self._hold(address, nbytes)

    def free(self, address: int) -> None:
        """Free the segment at `address`."""
        at = bisect_left(self._held, (address, 0))
        self.used_bytes -= self._held.pop(at)[1]

    def reserve(self, nbytes: int) -> int | None:
        """Return the base of an expandable segment: where that kind is mapped next."""
        address = next(self.later_maps(), None)
        if address is None:
            address = self._elsewhere
            self._elsewhere += nbytes
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        """Do nothing: address space is not counted."""

    def map(self, address: int, nbytes: int) -> bool:
        """Back `address` by `nbytes`; return False if memory was short in the recording."""
        del address
        if not self._has_room(self._next(), nbytes):
            return False
        self._use(nbytes)
        return True

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back the memory of `nbytes`."""
        del address
        self.used_bytes -= nbytes

    def adopt(self, address: int, nbytes: int, *, plain: bool) -> None:
        """Add memory that the allocator held when recording began."""
        self._use(nbytes)
        if plain:
            insort(self._held, (address, nbytes))

    def measure(self, free_bytes: int) -> None:
        """Tighten the capacity bounds, in whole pages, by the free bytes reported at a failure."""
        measured = self.used_bytes + free_bytes // PAGE_BYTES * PAGE_BYTES
        if free_bytes > 0 and (self.capacity_above_bytes is None or measured < self.capacity_above_bytes):
            self.least_capacity_bytes = max(self.least_capacity_bytes, measured)
            self.capacity_above_bytes = measured + PAGE_BYTES

    def _next(self) -> TraceEntry | None:
        """Return the next recorded exchange, or None."""
        at = self.exchanged()
        return self.expected[at] if at < len(self.expected) else None

    def _has_room(self, entry: TraceEntry | None, nbytes: int) -> bool:
        room = not self.refuses if entry is None else entry.action not in LOSSES
        if not room:
            above = self.used_bytes + nbytes
            self.capacity_above_bytes = min(above, self.capacity_above_bytes or above)
        return room

    def _hold(self, address: int | None, nbytes: int) -> int:
        """Hold `nbytes` at `address`, and return the address.

        It is a new one if `address` is None, or if the simulation still holds something there.
        """
        if address is not None:
            at = bisect_left(self._held, (address, 0))
            near = self._held[max(at - 1, 0) : at + 1]
            if any(start < address + nbytes and address < start + size for start, size in near):
                address = None
        if address is None:
            address = self._elsewhere
            self._elsewhere += nbytes
        insort(self._held, (address, nbytes))
        self._use(nbytes)
        return address

    def _use(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.least_capacity_bytes = max(self.least_capacity_bytes, self.used_bytes)


class RecordedAllocator(CachingAllocator):
    """PyTorch's allocator over a recorded device, which can begin with segments."""

    def __init__(self, config: CachingConfig, device: RecordedDevice) -> None:
        super().__init__(config, capacity_bytes=device.capacity_bytes, device=device)

    def adopt(self, segment: StartSegment, stream: int) -> None:
        """Begin with `segment`; an expandable one gets address space to grow into."""
        view = segment.view
        blocks = [(b.address, b.nbytes, b.requested_bytes, BLOCK_STATES.index(b.state)) for b in view.blocks]
        self._core.adopt(view.address, stream, segment.small, segment.expandable, blocks)
        self._follow()

    @property
    def exchanged(self) -> int:
        """The number of exchanges with the device, also while a call makes them."""
        return self._core.exchanged()

    @property
    def collects_garbage(self) -> bool:
        """Whether cached segments are released before memory runs out."""
        limited = self.capacity_bytes is not None and self.config.per_process_memory_fraction < 1
        return limited and self.config.garbage_collection_threshold > 0

    def is_small(self, nbytes: int) -> bool:
        """Return whether an allocation of `nbytes` goes to the small pool."""
        return round_size(nbytes, self.config.roundup_power2_divisions) <= SMALL_BYTES

    def finds(self, nbytes: int, stream: int) -> bool:
        """Return whether the cache could serve an allocation; changes nothing."""
        return self._core.finds(nbytes, stream)
