"""Pieces of blocks: the runs of sections in which each is live."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from overspill.core.errors import RequestError

from .columns import ANYWHERE, Integers
from .problem import Problem


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs `[start[r], end[r])` in which block `owner[r]` is live, in order of blocks, `[rows]`."""

    owner: Integers
    start: Integers
    end: Integers

    @classmethod
    def of(cls, problem: Problem) -> Pieces:
        """Return the pieces of all blocks; a block that is all gaps has none."""
        blocks = np.arange(len(problem))
        owner = np.concatenate([blocks, np.repeat(blocks, np.diff(problem.gap_first))])
        starts = np.concatenate([problem.start, problem.gap_end])
        ends = np.concatenate([problem.end, problem.gap_start])
        start, end = starts[np.lexsort((starts, owner))], ends[np.lexsort((ends, owner))]
        some = start < end
        return cls(np.sort(owner)[some], start[some], end[some])

    def first(self, blocks: int) -> Integers:
        """Return where each block's rows begin: `first[i]` to `first[i + 1]`."""
        return np.searchsorted(self.owner, np.arange(blocks + 1))

    def pairs(self) -> list[tuple[int, int]]:
        """Return pairs i < j of blocks that are ever live together, in order."""
        found: set[tuple[int, int]] = set()
        by_start = np.argsort(self.start, kind="stable")
        owner, start = self.owner[by_start].tolist(), self.start[by_start]
        until = np.searchsorted(start, self.end[by_start]).tolist()
        for row, block in enumerate(owner):
            found.update((min(block, other), max(block, other)) for other in owner[row + 1 : until[row]])
        return sorted(pair for pair in found if pair[0] < pair[1])


def refuse_clashing_pins(problem: Problem) -> None:
    """Raise RequestError if pinned blocks overlap while both are live."""
    if (problem.pinned == ANYWHERE).all():
        return
    # When each pinned piece begins and ends.
    pieces = Pieces.of(problem)
    changes: list[tuple[int, bool, tuple[int, int, int]]] = []
    for row in np.flatnonzero(problem.pinned[pieces.owner] != ANYWHERE).tolist():
        block = int(pieces.owner[row])
        low = int(problem.pinned[block])
        held = (low, low + int(problem.nbytes[block]), block)
        changes += [(int(pieces.start[row]), True, held), (int(pieces.end[row]), False, held)]
    # Sweep over time, with the live pinned blocks by address.
    live: list[tuple[int, int, int]] = []
    for _, begins, held in sorted(changes):
        at = bisect_left(live, held)
        if not begins:
            del live[at]
            continue
        for other in live[max(at - 1, 0) : at + 1]:
            if held[0] < other[1] and other[0] < held[1]:
                one, two = sorted((held[2], other[2]))
                raise RequestError(
                    f"the blocks at positions {problem.index[one]} and {problem.index[two]} of the trace are pinned "
                    "onto "
                    "the same bytes while both live; pin them apart"
                )
        live.insert(at, held)
