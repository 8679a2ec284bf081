"""The best-fit skyline heuristic, by several keys, plain and guarded.

It is that of profile-guided memory optimisation (Sekiyama et al. 2018).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing._packing import SkylinePacker
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes, rounded
from overspill.placement.packing.keys import KEYS, maximal_sections
from overspill.placement.packing.problem import Problem


def packer_of(problem: Problem) -> SkylinePacker:
    """Return a packer of a `solid` problem, for many keys (native/packing/skyline.hpp)."""
    return SkylinePacker(problem.start, problem.end, problem.nbytes, problem.alignment)


def solid(problem: Problem) -> Problem:
    """Return a problem without gaps whose layouts are all layouts of `problem`, and for plain blocks no others.

    Blocks hold their place in their gaps. Sizes are rounded up to the common divisor of all alignments. Only maximal
    sections are counted.
    """
    start, end = maximal_sections(problem)
    none = np.zeros(0, dtype=np.int64)
    return replace(
        rounded(problem),
        start=start,
        end=end,
        gap_first=np.zeros(len(problem) + 1, dtype=np.int64),
        gap_start=none,
        gap_end=none,
    )


class Skyline(Solver):
    """One run of the skyline heuristic by one of `keys.KEYS`; a block keeps its place in its gaps.

    It is section 3.2 of Sekiyama et al., "Profile-guided memory optimization for deep neural networks" (2018): take the
    lowest offset line, of equal ones the leftmost. Of the blocks whose life is inside the line, place the one with the
    largest key on it. If none exists, lift the line to its lower neighbour and merge them. Neighbouring lines of one
    height are one line.

    `guarded`: look ahead to the capacity, by default the lower bound. The *floor* of a section is the lowest offset
    that the lines leave to any of its unplaced blocks. Floor and unplaced bytes together must not exceed the capacity
    (section inference, as in Moffitt, "MiniMalloc", 2023). A block is refused if it would break this next to it, as far
    as the next walls of at least the height of its top, in a section whose unplaced bytes do not fit above that top.
    Then the next block by key is tried, 32 at most. If all are refused, the line is lifted if its own sections allow
    that. Otherwise the first block is placed after all, and the capacity raised to what that makes necessary.

    Raises RequestError for an unknown key.
    """

    name = "skyline"
    summary = "the lowest place first, and on it the block with the largest key that fits"
    source = "Sekiyama et al., Profile-guided memory optimization (2018), section 3.2"
    handles_pins = False

    def __init__(self, key: str = "lifetime", *, guarded: bool = False) -> None:
        if key not in KEYS:
            raise RequestError(f"no key {key!r}; there are {', '.join(KEYS)}")
        self.key, self.guarded = key, guarded
        self.name = f"{'guarded-' * guarded}skyline" + (f"-{key}" if key != "lifetime" else "")

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        filled = solid(problem)
        capacity = None
        if self.guarded:
            capacity = filled.lower_bound_bytes if limits.capacity_bytes is None else limits.capacity_bytes
        offsets = packer_of(filled).pack(KEYS[self.key](filled).astype(np.float64), capacity, None)
        return Packing(offsets, bound_bytes(problem))
