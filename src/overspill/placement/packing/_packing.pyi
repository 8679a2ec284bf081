"""The native offline solvers (native/packing/)."""

import numpy as np
from numpy.typing import NDArray

# The heuristic solvers (native/packing/heuristics_binding.cpp)

class SkylinePacker:
    """The blocks of one problem, to be packed many times; `solvers/skyline.py` has the rules."""

    def __init__(
        self, start: NDArray[np.int64], end: NDArray[np.int64], nbytes: NDArray[np.int64], alignment: NDArray[np.int64]
    ) -> None: ...
    def pack(self, key: NDArray[np.float64], capacity: int | None, limit: int | None) -> NDArray[np.int64] | None:
        """Return the offsets of all blocks, `[blocks]`; None once it is known that a block will end above `limit`.

        Blocks of larger key come first, ties by index. A capacity guards the packing.
        """

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
def merges(
    start: NDArray[np.int64], end: NDArray[np.int64], nbytes: NDArray[np.int64], most_waste: float, seed: int
) -> tuple[NDArray[np.int64], list[float]]:
    """Return boxes of two blocks (native/packing/boxes.hpp), `[boxes, 6]`, and their waste.

    A row has first, second, start, end, bytes and shift.
    """

# The check of layouts (native/packing/check_binding.cpp)

def check_layout(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    offset: NDArray[np.int64],
    gap_first: NDArray[np.int64],
    gap_start: NDArray[np.int64],
    gap_end: NDArray[np.int64],
) -> tuple[tuple[int, int] | None, int]:
    """Return two blocks that overlap (None: no blocks do), and the most live bytes, counted again."""

# The exact search (native/packing/exact_binding.cpp)

class ExactSearch:
    """Canonical branch and bound over one problem (native/packing/exact.hpp explains it).

    Piece `k` of block `i`, with `piece_first[i] <= k < piece_first[i + 1]`, lives in the sections from `piece_start[k]`
    to `piece_end[k]`. Sizes, alignments and pins are in whole units, one for each block.
    """

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
    ) -> tuple[int, int, list[int]]:
        """Return the outcome, the nodes visited, and offsets, which count if all fit.

        The outcome is 1 if all fit, 0 if they cannot, -1 if that is not known.
        """
