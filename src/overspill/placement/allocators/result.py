"""The result of a replay: peaks, exchanges with the device, failure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import RequestError
from overspill.placement.simulated_device import PAGE_BYTES, SMALL_BYTES

from .base import SEGMENT_ACTIONS, SegmentEvent

NOT_PLACED = -1


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of an allocator on events.

    Peaks are of the whole replay; `…_at` is the event of the first maximum. With `curves`, `requested`, `allocated` and
    `reserved` are set, and with `request_bytes` also `usable` and `spread`. All are bytes after each event that was
    done, `[events]`.
    """

    allocator: str
    capacity_bytes: int | None
    failed_at: int | None
    """The event that found too little memory, the last one that was tried; None: all were done."""
    peak_requested_bytes: int
    peak_requested_at: int
    peak_allocated_bytes: int
    peak_allocated_at: int
    peak_reserved_bytes: int
    peak_reserved_at: int
    retries: int
    """Allocations for which all cached memory was given back first."""
    skipped: int
    """Elastic allocations that found too little memory."""
    addresses: NDArray[np.int64]
    """Where each block was placed last, `[blocks]`; NOT_PLACED: never."""
    segment_table: NDArray[np.int64]
    requested: NDArray[np.int64] | None = None
    allocated: NDArray[np.int64] | None = None
    reserved: NDArray[np.int64] | None = None
    usable: NDArray[np.int64] | None = None
    """Bytes of the free blocks that hold `request_bytes`."""
    spread: NDArray[np.int64] | None = None
    """Bytes up to which the allocator's segments are used."""

    @property
    def fits(self) -> bool:
        """Whether every allocation that is not elastic found memory."""
        return self.failed_at is None

    @cached_property
    def peak_device_bytes(self) -> int:
        """Peak device bytes behind the reserved bytes; cudaMalloc gives whole pages."""
        if not len(self.segment_table):
            return 0
        nbytes, grows = self.segment_table[:, 3], self.segment_table[:, 1] % 2 == 0
        pages = np.where(nbytes < SMALL_BYTES, nbytes, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        return max(int(np.cumsum(np.where(grows, pages, -pages)).max()), self.peak_reserved_bytes)

    @cached_property
    def unusable(self) -> NDArray[np.float64]:
        """Share of free bytes in blocks too small for the request, `[events]`; 0 if no byte is free.

        It is U_f of eq. 1 in Dymem §3.3.1, for blocks of any size: 1 means that the request finds no free block. Raises
        RequestError if the replay was made without `request_bytes`.
        """
        if self.reserved is None or self.allocated is None or self.usable is None:
            raise RequestError("unusable space is that of a request: replay with request_bytes")
        free = self.reserved - self.allocated
        return (free - self.usable) / np.maximum(free, 1)

    @cached_property
    def segment_events(self) -> tuple[SegmentEvent, ...]:
        """The exchanges of memory with the device, in order."""
        rows = self.segment_table.tolist()
        return tuple(SegmentEvent(at, SEGMENT_ACTIONS[action], *rest) for at, action, *rest in rows)
