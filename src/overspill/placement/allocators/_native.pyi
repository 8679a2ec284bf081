"""The Python face of the native core (native/allocators/module.cpp)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def names() -> list[str]:
    """The allocators that there are."""

def replay(
    name: str,
    config: dict[str, Any],
    capacity_bytes: int | None,
    action: NDArray[np.int8],
    block: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    stream: NDArray[np.int32],
    mobility: NDArray[np.int8],
    block_count: int,
    curves: bool,
    request_bytes: int | None,
) -> tuple[int, int, int, NDArray[np.int64], NDArray[np.int64], list[tuple[int, int, int]], list[NDArray[np.int64]]]:
    """The events on the allocator `name`, with the settings `config`, over a simulated device of its own.

    The event that failed or -1, how many were skipped, retries, addresses, the segment table, gauges and curves.
    """
