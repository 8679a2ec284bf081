"""The native offline solvers (native/packing/)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The heuristic solvers (native/packing/heuristics_binding.cpp)

class SkylinePacker:
    """The blocks of one problem, to be packed many times; `solvers/skyline.py` has the rules."""

    def __init__(
        self, start: NDArray[np.int64], end: NDArray[np.int64], nbytes: NDArray[np.int64], alignment: NDArray[np.int64]
    ) -> None: ...
    def pack(self, key: NDArray[np.float64], capacity: int | None, limit: int | None) -> NDArray[np.int64] | None:
        """The offsets of all blocks, those of larger key first and ties by index; with a capacity, guarded by it.

        None once it is known that a block will end above `limit`.
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
    """Boxes of two (native/packing/boxes.hpp): of each first, second, start, end, bytes and shift in one row; the waste."""

# What is read, written and checked (native/packing/files_binding.cpp has these)

def read_rows(text: bytes, at: int, cells: int, places: Sequence[int]) -> list[NDArray[np.int64]] | None:
    """The columns of a plain CSV from the byte `at` on, None if it is not plain: for native/packing/csv_rows.hpp's roles.

    `places` are the cells of id, lower, upper, size, alignment, offset and space, -1 for one that is not there. Of ids
    there is the byte where each begins; then come where it ends, and where its line begins and ends.
    """

def with_offsets(
    text: bytes, line: NDArray[np.int64], line_end: NDArray[np.int64], offsets: NDArray[np.int64], place: int
) -> bytes:
    """The lines with the offsets in the cell `place`, behind all others if it is negative."""

def check_layout(
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    offset: NDArray[np.int64],
    gap_first: NDArray[np.int64],
    gap_start: NDArray[np.int64],
    gap_end: NDArray[np.int64],
) -> tuple[tuple[int, int] | None, int]:
    """Two blocks that overlap (None: there are none), and the most live bytes, counted anew."""

# The exact search (native/packing/exact_binding.cpp)

class ExactSearch:
    """Canonical branch and bound over one problem (native/packing/exact.hpp says how).

    Piece `k` of block `i`, with `piece_first[i] <= k < piece_first[i + 1]`, lives in the sections from `piece_start[k]`
    to `piece_end[k]`; sizes, alignments and pins are in whole units, one a block.
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
        """The outcome (1: all fit, 0: they cannot, -1: not known), the nodes visited, and offsets, which count if all fit."""
