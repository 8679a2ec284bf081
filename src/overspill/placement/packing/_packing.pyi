"""The native offline solvers (native/packing/)."""

import numpy as np
from numpy.typing import NDArray

# The heuristic solvers (native/packing/heuristics_binding.cpp)

class SkylinePacker:
    """The blocks of one problem, to be packed many times; see `overspill.placement.packing.solvers.skyline.Packer`."""

    def __init__(
        self,
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        alignment: NDArray[np.int64],
    ) -> None: ...
    def pack(self, key: NDArray[np.float64], capacity: int | None, limit: int | None) -> NDArray[np.int64] | None: ...

def greedy(
    nbytes: NDArray[np.int64],
    alignment: NDArray[np.int64],
    pinned: NDArray[np.int64],
    piece_first: NDArray[np.int64],
    piece_start: NDArray[np.int64],
    piece_end: NDArray[np.int64],
    order: NDArray[np.int64],
    best_fit: bool,
) -> NDArray[np.int64]: ...

# The exact search (native/packing/exact_binding.cpp)

class ExactSearch:
    """The native twin of overspill.placement.packing.solvers.exact_twin.TwinSearch."""

    def __init__(
        self,
        sections: int,
        piece_first: NDArray[np.int64],
        piece_start: NDArray[np.int64],
        piece_end: NDArray[np.int64],
        size: NDArray[np.int64],
        alignment: NDArray[np.int64],
        pinned: NDArray[np.int64],
        below: NDArray[np.int64],
        lifetime: NDArray[np.int64],
    ) -> None: ...
    def attempt(
        self,
        highest: NDArray[np.int64],
        ceiling: NDArray[np.int64],
        keys: str,
        noise: NDArray[np.float64],
        live: bool,
        node_limit: int,
        seconds: float,
    ) -> tuple[int, int, list[int]]: ...

class BackjumpSearch:
    """The native twin of overspill.placement.packing.solvers.backjump_twin.TwinBackjumpSearch."""

    def __init__(
        self,
        sections: int,
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        size: NDArray[np.int64],
        below: NDArray[np.int64],
    ) -> None: ...
    def attempt(
        self, capacity: int, rank: NDArray[np.int64], patience: int, seconds: float
    ) -> tuple[bool, int, list[int], list[int]]: ...
