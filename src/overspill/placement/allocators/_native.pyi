"""The Python face of the native core (native/allocators/module.cpp)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def names() -> list[str]:
    """Return the names of all allocators."""

def round_size(nbytes: int, divisions: Sequence[int]) -> int:
    """Return the bytes of the block that PyTorch's allocator makes for a request."""

class Stepper:
    """An allocator that is called event by event; `at` is the number of the event."""

    def __init__(self, name: str, config: dict[str, Any], capacity_bytes: int | None, device: Any) -> None: ...
    def allocate(self, at: int, nbytes: int, stream: int, mobility: int = 0) -> int | None: ...
    def free(self, at: int, address: int) -> bool:
        """Free the block at `address`, and return whether one was allocated there."""

    def empty_cache(self, at: int) -> None: ...
    def adopt(
        self, base: int, stream: int, small: bool, expandable: bool, blocks: list[tuple[int, int, int, int]]
    ) -> None:
        """Begin with a segment of PyTorch's: for each block its address, size, requested bytes and state."""

    def finds(self, nbytes: int, stream: int) -> bool:
        """Return whether PyTorch's cache could serve an allocation."""

    def mark_step(self) -> None:
        """End a step of the job."""

    def counts(self) -> list[int]:
        """Return the fields of PlannedCounts."""

    def gauges(self) -> list[tuple[int, int, int]]:
        """Return requested, allocated and reserved bytes: for each its value now, its peak, and the peak's event."""

    def retries(self) -> int: ...
    def used_bytes(self) -> int: ...
    def spread_bytes(self) -> int: ...
    def usable_bytes(self, request: int) -> int: ...
    def exchanged(self) -> int:
        """Return the number of exchanges with the device."""

    def exchanges(self, first: int) -> list[tuple[int, int, int, int, int]]:
        """Return each exchange from the number `first` on: event, action, address, bytes, stream."""

    def live_addresses(self) -> list[int]: ...
    def idle_count(self) -> int: ...
    def segments(self) -> list[tuple[int, list[tuple[int, int, int, int]]]]:
        """Return for each segment, by address, its stream and its blocks as in `adopt`."""

def replay(
    name: str,
    config: dict[str, Any],
    capacity_bytes: int | None,
    action: NDArray[np.int8],
    block: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    stream: NDArray[np.int32],
    block_count: int,
    curves: bool,
    request_bytes: int | None,
    mobility: NDArray[np.int8] | None = None,
) -> tuple[int, int, int, NDArray[np.int64], NDArray[np.int64], list[tuple[int, int, int]], list[NDArray[np.int64]]]:
    """Replay the events on the allocator `name`, with the settings `config`, over a simulated device of its own.

    Returns the event that failed or -1, how many were skipped, retries, addresses, the segment table, gauges and
    curves.
    """
