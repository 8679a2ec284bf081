"""The pieces of a problem's blocks: the runs of sections in which they live, and which blocks ever live together."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from .problem import ANYWHERE, Integers, Problem

END = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Pieces:
    """Row r is a run `[start[r], end[r])` of sections in which block `owner[r]` lives; rows are in order of blocks."""

    owner: Integers
    start: Integers
    end: Integers

    @classmethod
    def of(cls, problem: Problem) -> Pieces:
        """The pieces of all blocks of `problem`; a block that is all gaps has none."""
        blocks = np.arange(len(problem))
        owner = np.concatenate([blocks, np.repeat(blocks, np.diff(problem.gap_first))])
        starts = np.concatenate([problem.start, problem.gap_end])
        ends = np.concatenate([problem.end, problem.gap_start])
        start, end = starts[np.lexsort((starts, owner))], ends[np.lexsort((ends, owner))]
        some = start < end
        return cls(np.sort(owner)[some], start[some], end[some])

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs i < j of blocks that are live together at some time, in order."""
        found: set[tuple[int, int]] = set()
        by_start = np.argsort(self.start, kind="stable")
        owner, start = self.owner[by_start].tolist(), self.start[by_start]
        until = np.searchsorted(start, self.end[by_start]).tolist()
        for row, block in enumerate(owner):
            found.update((min(block, other), max(block, other)) for other in owner[row + 1 : until[row]])
        return sorted(pair for pair in found if pair[0] < pair[1])


def clashing_pins(problem: Problem) -> tuple[int, int] | None:
    """Two blocks that are pinned to common bytes at a common time, if there are any: then no layout exists."""
    held = np.flatnonzero(problem.pinned != ANYWHERE)
    if held.size < 2:
        return None
    fixed = set(held.tolist())
    end = problem.pinned + problem.nbytes
    for a, b in Pieces.of(problem).pairs():
        if a in fixed and b in fixed and problem.pinned[a] < end[b] and problem.pinned[b] < end[a]:
            return a, b
    return None


def common_unit(problem: Problem) -> int:
    """Bytes that all sizes, alignments and pinned addresses of a problem are multiples of."""
    alignment = np.where(problem.alignment > 1, problem.alignment, 0)
    pinned = np.where(problem.pinned == ANYWHERE, 0, problem.pinned)
    return gcd(*problem.nbytes.tolist(), *alignment.tolist(), *pinned.tolist()) or 1


def first_fit(problem: Problem) -> Integers:
    """Offsets for a problem without clashing pins: the largest block first, each as low as it can lie.

    Raises ValueError where two pins clash.
    """
    pieces = Pieces.of(problem)
    first = np.searchsorted(pieces.owner, np.arange(len(problem) + 1))
    offsets = np.where(problem.pinned == ANYWHERE, 0, problem.pinned)
    order = np.lexsort((-problem.lifetime, -problem.nbytes, problem.pinned == ANYWHERE)).tolist()
    placed = np.zeros(len(problem), dtype=bool)
    for block in order:
        meets = np.zeros(pieces.owner.size, dtype=bool)
        for row in range(first[block], first[block + 1]):
            meets |= (pieces.start < pieces.end[row]) & (pieces.start[row] < pieces.end)
        others = np.unique(pieces.owner[meets])
        others = others[placed[others]]
        if problem.pinned[block] == ANYWHERE:
            step = problem.alignment[block]
            others = others[np.argsort(offsets[others], kind="stable")]
            tops = np.maximum.accumulate(np.concatenate([[0], offsets[others] + problem.nbytes[others]]))
            places = -(-tops // step) * step
            room = places + problem.nbytes[block] <= np.concatenate([offsets[others], [END]])
            offsets[block] = places[np.argmax(room)]
        elif (
            (offsets[others] < offsets[block] + problem.nbytes[block])
            & (offsets[block] < offsets[others] + problem.nbytes[others])
        ).any():
            raise ValueError(f"block {block} is pinned to bytes of another")
        placed[block] = True
    return offsets
