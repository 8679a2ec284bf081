"""The backjumping search in plain Python: the readable twin, and the test oracle, of native/packing/backjump.hpp.

Like the exact search it places blocks from the bottom up, each at the lowest offset that is possible, and gives up a
decision where a section has no room for what is left. Over hundreds of sections, most decisions have nothing to do with
the dead end: the last ones were about another time. So each lowest offset has a *reason*, the placed blocks that it
follows from, and a dead end a *conflict*, the reasons of the blocks that have no room. The search goes back to the
last decision in the conflict, and what came after is undone but not tried otherwise (conflict-directed backjumping:
Prosser, "Hybrid algorithms for the constraint satisfaction problem", 1993). There the block is forbidden to lie where
it was tried: it must lie on an unplaced one, and the rest of the conflict is the reason.

Reasons leave out what would have to be known about where supports lie, so that the search may miss layouts: where it
ends without one, nothing is proven.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from overspill.placement.packing.problem import Integers

DECISIONS_PER_STOP = 64


@dataclass
class _State:
    """What a decision changes; sets of blocks are the bits of an integer."""

    offset: dict[int, int]  # of each unplaced block: the lowest possible one
    reason: list[int]  # of each block: the placed blocks that this follows from


class TwinBackjumpSearch:
    """The blocks of a plain problem; block i lives in the sections [start[i], end[i]).

    `below[i]` is an equal block that is placed before block i, or -1.
    """

    def __init__(self, sections: int, start: Integers, end: Integers, size: Integers, below: Integers) -> None:
        self._start, self._end = start.tolist(), end.tolist()
        self._size, self._below = size.tolist(), below.tolist()
        lives = list(zip(self._start, self._end, strict=True))
        self._covers = [[i for i, (first, last) in enumerate(lives) if first <= t < last] for t in range(sections)]
        self._neighbours = [
            [j for j, (first, last) in enumerate(lives) if j != i and first < lives[i][1] and lives[i][0] < last]
            for i in range(len(lives))
        ]

    def attempt(
        self, capacity: int, rank: Integers, patience: int, seconds: float
    ) -> tuple[bool, int, list[int], list[int]]:
        """Whether a layout was found, the nodes, the offsets, which count if so, and the blames.

        Blocks come in the order of their lowest offsets, equal ones by `rank`. A node is a decision made or undone. It
        gives up after `patience` nodes without more blocks placed than ever before, or after `seconds`. The blames say
        how often each block was left in a section without room.
        """
        deadline = time.perf_counter() + seconds
        n = len(self._size)
        self._capacity, self._blames = capacity, [0] * n
        self._state = _State(dict.fromkeys(range(n), 0), [0] * n)
        offsets = [0] * n
        decisions: list[tuple[int, int, _State]] = []
        nodes = most = last_gain = made = 0
        while len(decisions) < n:
            if len(decisions) > most:
                most, last_gain = len(decisions), nodes
            nodes, made = nodes + 1, made + 1
            if nodes - last_gain > patience or (made % DECISIONS_PER_STOP == 0 and time.perf_counter() > deadline):
                return False, nodes, offsets, self._blames
            block = self._next(rank)
            offset = offsets[block] = self._state.offset[block]
            decisions.append((block, offset, _State(dict(self._state.offset), list(self._state.reason))))
            conflict = self._place(block)
            while conflict is not None:
                if not decisions:
                    return False, nodes, offsets, self._blames
                nodes += 1
                block, offset, self._state = decisions.pop()
                if conflict >> block & 1:
                    conflict = self._forbid(block, offset, conflict & ~(1 << block))
        return True, nodes, offsets, self._blames

    def _next(self, rank: Integers) -> int:
        offset = self._state.offset
        return min((i for i in offset if self._below[i] not in offset), key=lambda i: (offset[i], rank[i]))

    def _place(self, block: int) -> int | None:
        """Place a block at its lowest offset; the conflict if that leaves too little room somewhere."""
        state = self._state
        top = state.offset.pop(block) + self._size[block]
        raised = [i for i in self._neighbours[block] if i in state.offset and state.offset[i] < top]
        for other in raised:
            state.offset[other] = top
            state.reason[other] |= 1 << block
        changed = [block, *raised]
        return self._without_room(min(self._start[i] for i in changed), max(self._end[i] for i in changed))

    def _forbid(self, block: int, offset: int, conflict: int) -> int | None:
        """The block lies higher than `offset`, because of the conflict; the next conflict if it cannot."""
        state = self._state
        around = {i: max(state.offset[i], offset) for i in self._neighbours[block] if i in state.offset}
        conflict |= state.reason[block]
        if not around:
            return conflict
        support = min(low + self._size[i] for i, low in around.items())
        for other in around:
            if offset + self._size[other] < support:
                conflict |= state.reason[other]
        state.offset[block], state.reason[block] = support, conflict
        return self._without_room(self._start[block], self._end[block])

    def _without_room(self, first: int, last: int) -> int | None:
        """The conflict of the first section from `first` to before `last` that has too little room."""
        state = self._state
        for t in range(first, last):
            left = [i for i in self._covers[t] if i in state.offset]
            if left and min(state.offset[i] for i in left) + sum(self._size[i] for i in left) > self._capacity:
                conflict = 0
                for block in left:
                    conflict |= state.reason[block]
                    self._blames[block] += 1
                return conflict
        return None
