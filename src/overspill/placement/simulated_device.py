"""A simulated device that hands out address ranges until memory is full."""

from __future__ import annotations

from bisect import bisect_left, insort

from overspill.core.errors import RequestError

PAGE_BYTES = 2 << 20
"""Page size of cudaMalloc and cuMemCreate."""
SMALL_BYTES = 1 << 20
"""Requests below this share a page: the driver packs small ones, 512 bytes apart, into pages of 2 MiB."""
SMALL_STEP_BYTES = 512
FIRST_ADDRESS = PAGE_BYTES
"""No block is at address 0, which is that of blocks of no bytes."""
ADDRESS_SPACE_BYTES = 1 << 56
"""All addresses are below this; an unlimited device ends here."""


class SimulatedDevice:
    """A device with the rules of cudaMalloc and cuMemCreate.

    It has `capacity_bytes` (None: unlimited). Addresses are given out lowest first and can be reused. Memory is counted
    in whole pages.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise RequestError(f"a device cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._space = FreeRanges(FIRST_ADDRESS, ADDRESS_SPACE_BYTES)
        self._sizes: dict[int, int] = {}
        self._shared = SharedPages()

    def malloc(self, nbytes: int) -> int | None:
        """Return the address of `nbytes` new bytes, or None if memory is short."""
        if nbytes < SMALL_BYTES:
            return self._malloc_small(round_up(nbytes, SMALL_STEP_BYTES))
        size = round_up(nbytes, PAGE_BYTES)
        address = self._take_pages(size)
        if address is not None:
            self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        """Free the memory that `malloc` gave at `address`."""
        size = self._sizes.pop(address)
        if size >= PAGE_BYTES:
            self._give_pages(address, size)
            return
        page = self._shared.give(address, size)
        if page is not None:
            self._give_pages(page, PAGE_BYTES)

    def reserve(self, nbytes: int) -> int | None:
        """Return an address range of `nbytes` without memory, or None (cuMemAddressReserve)."""
        return self._space.take(round_up(nbytes, PAGE_BYTES))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give back a range from `reserve`."""
        self._space.give(address, round_up(nbytes, PAGE_BYTES))

    def map(self, address: int, nbytes: int) -> bool:  # noqa: ARG002  # a live device needs the address
        """Back reserved addresses by `nbytes`, in whole pages (cuMemCreate, cuMemMap); return False without memory."""
        if self.capacity_bytes is not None and self.used_bytes + nbytes > self.capacity_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def unmap(self, address: int, nbytes: int) -> None:  # noqa: ARG002
        """Take back the memory of `nbytes` that `map` gave."""
        self.used_bytes -= nbytes

    def _take_pages(self, size: int) -> int | None:
        if self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            return None
        address = self._space.take(size)
        if address is not None:
            self.used_bytes += size
        return address

    def _give_pages(self, address: int, size: int) -> None:
        self._space.give(address, size)
        self.used_bytes -= size

    def _malloc_small(self, size: int) -> int | None:
        address = self._shared.take(size)
        if address is None:
            page = self._take_pages(PAGE_BYTES)
            if page is None:
                return None
            self._shared.give(page, PAGE_BYTES)
            address = self._shared.take(size)
            assert address is not None
        self._sizes[address] = size
        return address


class SharedPages:
    """Holes in pages shared by small requests; the smallest that fits is taken, the lowest among equals."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        self._starts_by_end: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` of a hole, and return its start, or None if none is large enough."""
        position = bisect_left(self._holes, (nbytes, 0))
        if position == len(self._holes):
            return None
        size, start = self._holes[position]
        self._remove(start)
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> int | None:
        """Free `[start, start + nbytes)`, and return the page's address if it is now empty.

        An empty page leaves; a whole page that is given is new and stays.
        """
        new = nbytes == PAGE_BYTES
        end = start + nbytes
        # Join the holes on both sides.
        if end % PAGE_BYTES and end in self._sizes:
            end += self._remove(end)
        if start % PAGE_BYTES and start in self._starts_by_end:
            start -= self._remove(self._starts_by_end[start])
        if end - start == PAGE_BYTES and not new:
            return start
        self._add(start, end - start)
        return None

    def _add(self, start: int, size: int) -> None:
        insort(self._holes, (size, start))
        self._sizes[start] = size
        self._starts_by_end[start + size] = start

    def _remove(self, start: int) -> int:
        """Remove the hole at `start`, and return its size."""
        size = self._sizes.pop(start)
        del self._starts_by_end[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
        return size


class FreeRanges:
    """Free address ranges within `[start, end)`; neighbours are always joined."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._sizes = {start: end - start}
        self.free_bytes = end - start

    def take(self, nbytes: int) -> int | None:
        """Take the lowest free range of `nbytes`, and return its start, or None."""
        if nbytes > self.free_bytes:
            return None
        for i, start in enumerate(self._starts):
            size = self._sizes[start]
            # The rest of the range stays free.
            if size >= nbytes:
                del self._sizes[start]
                if size == nbytes:
                    del self._starts[i]
                else:
                    self._starts[i] = start + nbytes
                    self._sizes[start + nbytes] = size - nbytes
                self.free_bytes -= nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Free `[start, start + nbytes)` again."""
        self.free_bytes += nbytes
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + nbytes:
            nbytes += self._sizes.pop(self._starts.pop(i))
        if i and self._starts[i - 1] + self._sizes[self._starts[i - 1]] == start:
            self._sizes[self._starts[i - 1]] += nbytes
        else:
            self._starts.insert(i, start)
            self._sizes[start] = nbytes


def round_up(nbytes: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `nbytes`."""
    return -(-nbytes // step) * step
