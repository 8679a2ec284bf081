"""The exact search in plain Python: the readable twin, and the test oracle, of native/packing/exact.hpp.

It finds canonical solutions: each block lies on the floor or on another block, and blocks are placed in the order of
their offsets, equal offsets in the order of a *preorder*. Any layout can be let down to a canonical one, so the search
is complete. Canonical search, sections, dominance, hatless pruning and decomposition: M. D. Moffitt, MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning, ASPLOS 2023 (github.com/google/minimalloc).

An aligned block lies at the lowest of its offsets above what it lies on; a pinned block is placed when its address comes
up, and others may lie on it; a block with gaps takes part in all sections of all its pieces. The search stays complete:
such blocks can be let down in the same way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from overspill.placement.packing.problem import ANYWHERE, Integers

FITS, INFEASIBLE, UNKNOWN = 1, 0, -1
NODES_PER_STOP = 64
FAR = 2**61


class _OutOfNodes(Exception):
    """The node or time limit is reached."""


@dataclass
class _State:
    """What placing a block changes; sections t, boundaries between t - 1 and t."""

    offset: list[int]  # of a placed block; the lowest possible one of an unplaced block
    rank: list[int]  # in the preorder of its part
    placed: list[bool]
    floor: list[int]  # of each section: the lowest offset of what is unplaced
    left: list[int]  # of each section: the total of what is unplaced
    crossing: list[int]  # of each boundary: how many unplaced blocks cross it


@dataclass(frozen=True)
class _Part:
    """An independent part of what is left: unplaced blocks in preorder, all within the sections [first, last).

    Those blocks lie no lower than `offset`, and at the same offset come later in the preorder than `rank`.
    """

    first: int
    last: int
    blocks: list[int]
    offset: int
    rank: int


class TwinSearch:
    """The blocks of an ExactModel. `attempt` looks for a place for all of them."""

    def __init__(
        self,
        sections: int,
        piece_first: Integers,
        piece_start: Integers,
        piece_end: Integers,
        size: Integers,
        alignment: Integers,
        pinned: Integers,
        below: Integers,
        lifetime: Integers,
    ) -> None:
        pieces = list(zip(piece_start.tolist(), piece_end.tolist(), strict=True))
        self.sections = sections
        self.pieces = [pieces[a:b] for a, b in pairwise(piece_first.tolist())]
        self.size, self.alignment, self.lifetime = size.tolist(), alignment.tolist(), lifetime.tolist()
        self.pinned, self.below = pinned.tolist(), below.tolist()
        self.blocks = [block for block, runs in enumerate(self.pieces) if runs]
        self.covers: list[list[int]] = [[] for _ in range(sections)]
        for block in self.blocks:
            for t in self._live(block):
                self.covers[t].append(block)
        self.neighbours = [
            sorted({other for t in self._live(block) for other in self.covers[t]} - {block})
            for block in range(len(size))
        ]

    def attempt(
        self,
        highest: Integers,
        ceiling: Integers,
        keys: str,
        noise: NDArray[np.float64],
        live: bool,
        node_limit: int,
        seconds: float,
    ) -> tuple[int, int, list[int]]:
        """Whether every block i can lie at or below `highest[i]`, and each section within its `ceiling`.

        Blocks of one offset are tried in decreasing order of `keys` times `noise`, a factor for each block and key:
        lifetime (W), size (S), area (A), the total of the fullest section (T); if `live`, independent parts are put in order
        anew. Returns the outcome (FITS, INFEASIBLE, UNKNOWN at a limit), the nodes, and the offsets, which count if all
        fit.
        """
        self.highest, self.ceiling = highest.tolist(), ceiling.tolist()
        self.keys, self.noise, self.live = keys, noise, live
        self.node_limit, self.deadline = node_limit, time.perf_counter() + seconds
        self.nodes = 0
        state = self.state = self._start()
        if any(o > h for o, h in zip(state.offset, self.highest, strict=True)) or not self._raise_floors(
            range(self.sections)
        ):
            return INFEASIBLE, 0, state.offset
        parts = self._split(_Part(0, self.sections, self.blocks, 0, -1), 0, -1, root=True)
        try:
            fits = all(self._solve(part) for part in parts)
        except _OutOfNodes:
            return UNKNOWN, self.nodes, state.offset
        return (FITS if fits else INFEASIBLE), self.nodes, self.state.offset

    def _live(self, block: int) -> Iterator[int]:
        for start, end in self.pieces[block]:
            yield from range(start, end)

    def _start(self) -> _State:
        n = len(self.size)
        crossing = [0] * (self.sections + 1)
        for block in self.blocks:
            for t in range(self.pieces[block][0][0] + 1, self.pieces[block][-1][1]):
                crossing[t] += 1
        return _State(
            offset=[0 if pin == ANYWHERE else pin for pin in self.pinned],
            rank=list(range(n)),
            placed=[False] * n,
            floor=[0] * self.sections,
            left=[sum(self.size[block] for block in covers) for covers in self.covers],
            crossing=crossing,
        )

    def _raise_floors(self, sections: range) -> bool:
        """Section inference: lift floors to what is unplaced there; False where that cannot fit below the ceiling."""
        state = self.state
        for t in sections:
            if not state.left[t]:
                continue
            state.floor[t] = min(state.offset[block] for block in self.covers[t] if not state.placed[block])
            if state.floor[t] + state.left[t] > self.ceiling[t]:
                return False
        return True

    def _solve(self, part: _Part) -> bool:
        """Place all blocks of `part`; False, and the state as it was, if they cannot be."""
        self.nodes += 1
        if self.nodes > self.node_limit:
            raise _OutOfNodes
        if self.nodes % NODES_PER_STOP == 0 and time.perf_counter() > self.deadline:
            raise _OutOfNodes
        at_entry = deepcopy(self.state)
        for offset, rank, block in self._candidates(part):
            if self.state.offset[block] != offset:
                continue  # raised since by what was learnt
            before = deepcopy(self.state)
            parts = self._place(part, block, offset, rank)
            if parts is not None and all(self._solve(each) for each in parts):
                return True
            self.state = before
            if not self._learn(block, offset):
                break
        self.state = at_entry
        return False

    def _candidates(self, part: _Part) -> list[tuple[int, int, int]]:
        """The (offset, rank, block) that may come next.

        Dominance: a block at or above the top that another could have would leave a hole where that other fits. The
        monotonic floor: whatever is left in any section must fit above the next offset. A pinned block comes when its
        offset does, and of equal blocks the earlier one first.
        """
        state = self.state
        lowest_top = min(state.offset[block] + self.size[block] for block in part.blocks)
        sections = [t for t in range(part.first, part.last) if state.left[t]]
        highest = min(self.ceiling[t] - state.left[t] for t in sections)
        forced = min(
            ((state.offset[b], state.rank[b]) for b in part.blocks if self.pinned[b] != ANYWHERE), default=None
        )
        found = []
        for block in part.blocks:
            place = state.offset[block], state.rank[block]
            below = self.below[block]
            if (
                place[0] < lowest_top
                and place[0] <= highest
                and place >= (part.offset, part.rank)
                and (below < 0 or state.placed[below])
                and (forced is None or place <= forced)
            ):
                found.append((*place, block))
        return sorted(found)

    def _place(self, part: _Part, block: int, offset: int, rank: int) -> list[_Part] | None:
        """Place a block; the parts that what is left of `part` falls into, or None where that cannot fit."""
        state, top = self.state, offset + self.size[block]
        state.placed[block] = True
        for t in self._live(block):
            state.left[t] -= self.size[block]
        for other in self.neighbours[block]:
            if state.placed[other] or state.offset[other] >= top:
                continue
            state.offset[other] = _aligned(top, self.alignment[other])
            if state.offset[other] > self.highest[other] or self.pinned[other] != ANYWHERE:
                return None
        if not self._raise_floors(range(part.first, part.last)):
            return None
        boundaries = range(self.pieces[block][0][0] + 1, self.pieces[block][-1][1])
        for t in boundaries:
            state.crossing[t] -= 1
        left = _Part(part.first, part.last, [b for b in part.blocks if b != block], offset, rank)
        if any(not state.crossing[t] for t in boundaries):
            return self._split(left, offset, rank)
        return [left] if left.blocks else []

    def _split(self, part: _Part, offset: int, rank: int, *, root: bool = False) -> list[_Part]:
        """The parts between boundaries that no unplaced block crosses."""
        by_start: dict[int, list[int]] = defaultdict(list)
        starts = [t for t in range(part.first, part.last) if t == part.first or not self.state.crossing[t]]
        for block in part.blocks:
            by_start[max(t for t in starts if t <= self.pieces[block][0][0])].append(block)
        ends = dict(zip(starts, [*starts[1:], part.last], strict=True))
        parts = [_Part(t, ends[t], by_start[t], offset, rank) for t in starts if by_start[t]]
        if not root and (not self.live or len(parts) == 1):
            return parts
        return [_Part(p.first, p.last, self._in_preorder(p.blocks), 0, -1) for p in parts]

    def _in_preorder(self, blocks: list[int]) -> list[int]:
        ordered = sorted(blocks, key=self._keys, reverse=True)
        for rank, block in enumerate(ordered):
            self.state.rank[block] = rank
        return ordered

    def _keys(self, block: int) -> tuple[float, ...]:
        values = {
            "W": float(self.lifetime[block]),
            "S": float(self.size[block]),
            "A": float(self.lifetime[block]) * float(self.size[block]),
            "T": float(max(self.state.left[t] for t in self._live(block))),
        }
        return tuple(values[key] * float(factor) for key, factor in zip(self.keys, self.noise[block], strict=True))

    def _learn(self, block: int, offset: int) -> bool:
        """What follows when `block` cannot come next at `offset`; False if nothing else can come next either.

        Hatless pruning: if no unplaced block can come to lie on it, it could as well lie here. Skip strengthening: else
        it must lie on a block that is placed later, so no lower than the lowest top of those.
        """
        state = self.state
        others = [other for other in self.neighbours[block] if not state.placed[other]]
        if not others or self.pinned[block] != ANYWHERE:
            return False
        support = min(max(state.offset[other], offset) + self.size[other] for other in others)
        support = _aligned(support, self.alignment[block])
        if support > self.highest[block]:
            return False
        if support <= state.offset[block]:
            return True
        state.offset[block] = support
        return self._raise_floors(range(self.pieces[block][0][0], self.pieces[block][-1][1]))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
