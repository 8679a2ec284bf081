"""The best-fit skyline heuristic of profile-guided memory optimisation, by several keys, plain and guarded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing import native as native_code
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes, rounded
from overspill.placement.packing.keys import KEYS, Floats, maximal_sections
from overspill.placement.packing.problem import Integers, Problem

CANDIDATES = 32
"""How many blocks the guard looks at for one place."""


class Packer(Protocol):
    """The blocks of a problem, to be packed by the skyline heuristic many times."""

    def pack(self, key: Floats, capacity: int | None, limit: int | None) -> Integers | None:
        """The offsets of all blocks, those of larger key first and ties by index; with a capacity, guarded by it.

        Nothing once it is known that a block will end above `limit`. See `TwinPacker`.
        """


@dataclass
class Line:
    """All below `height` bytes is filled, or given up, in the sections `[start, end)`."""

    start: int
    end: int
    height: int


class TwinPacker:
    """Section 3.2 of Sekiyama et al., "Profile-guided memory optimization for deep neural networks" (2018).

    Take the lowest offset line, of equal ones the leftmost. Place on it, of the blocks whose life lies inside the line,
    the one with the largest key. Where there is none, lift the line to its lower neighbour and merge them. Neighbouring
    lines of one height are one line.

    The guarded form looks ahead to a capacity. The *floor* of a section is the lowest offset that the lines leave to any
    of its unplaced blocks; floor and unplaced bytes together must not exceed the capacity (section inference, as in
    Moffitt, "MiniMalloc", 2023). A block is refused if it would break this beside it, as far as the next walls of at
    least the height of its top, in a section whose unplaced bytes have no room above that top. Then the next block by
    key is tried, `CANDIDATES` at most. Where all are refused the line is lifted if its own sections allow that.
    Otherwise the first block is placed after all, and the capacity raised to what that makes necessary.
    """

    def __init__(self, start: Integers, end: Integers, nbytes: Integers, alignment: Integers) -> None:
        self._lives: list[tuple[int, int]] = list(zip(start.tolist(), end.tolist(), strict=True))
        self._nbytes, self._alignment = nbytes.tolist(), alignment.tolist()

    def pack(self, key: Floats, capacity: int | None, limit: int | None) -> Integers | None:
        unplaced = sorted(range(len(key)), key=lambda i: -key[i])
        offsets = np.zeros(len(key), dtype=np.int64)
        lines = [Line(0, max((end for _, end in self._lives), default=0), 0)]
        guard = None if capacity is None else Guard(self._lives, self._nbytes, unplaced, lines, capacity)
        while unplaced:
            line = min(lines, key=lambda line: line.height)
            block = self._choose(line, unplaced, guard)
            if block is None:
                line.height = _lower_wall(lines, line)
                _merge(lines)
                continue
            top = self._top(line, block)
            if limit is not None and max(top, guard.needed if guard else 0) > limit:
                return None
            offsets[block] = top - self._nbytes[block]
            unplaced.remove(block)
            _raise(lines, line, self._lives[block], top)
            _merge(lines)
        return offsets

    def _top(self, line: Line, block: int) -> int:
        """The end of the block when it lies on the line."""
        alignment: int = self._alignment[block]
        return -(-line.height // alignment) * alignment + int(self._nbytes[block])

    def _choose(self, line: Line, unplaced: list[int], guard: Guard | None) -> int | None:
        """The block to place on the line, or none to lift it."""
        inside = [i for i in unplaced if line.start <= self._lives[i][0] and self._lives[i][1] <= line.end]
        if not inside or guard is None:
            return inside[0] if inside else None
        for block in inside[:CANDIDATES]:
            if guard.allows(line, block, self._top(line, block)):
                return block
        if guard.allows_lifting(line):
            return None
        guard.give_way(line, inside[0], self._top(line, inside[0]))
        return inside[0]


@dataclass
class Guard:
    """The look-ahead of a guarded run; `needed` is what the blocks placed so far have raised its capacity to."""

    lives: list[tuple[int, int]]
    nbytes: list[int]
    unplaced: list[int]
    lines: list[Line]
    capacity: int
    needed: int = 0

    def __post_init__(self) -> None:
        self.capacity = max(self.capacity, *(self._left(t) for t in range(self.lines[-1].end)), 0)

    def allows(self, line: Line, block: int, top: int) -> bool:
        """Whether no section beside the block breaks the capacity once it is placed on the line."""
        return self._broken_beside(line, block, top) is None

    def allows_lifting(self, line: Line) -> bool:
        """Whether the line has a wall, and may rise to the lower one without breaking the capacity."""
        if len(self.lines) == 1:
            return False
        wall = _lower_wall(self.lines, line)
        return all(self._left(t) + wall <= self.capacity for t in range(line.start, line.end))

    def give_way(self, line: Line, block: int, top: int) -> None:
        """Raise the capacity to what this block on the line makes necessary."""
        while (need := self._broken_beside(line, block, top)) is not None:
            self.capacity = self.needed = need

    def _broken_beside(self, line: Line, block: int, top: int) -> int | None:
        """The floor and unplaced bytes of the first section beside the block that needs more than the capacity."""
        lines = [replace(other) for other in self.lines]
        start, end = self.lives[block]
        _raise(lines, lines[self.lines.index(line)], (start, end), top)
        heights = [other.height for other in lines for _ in range(other.start, other.end)]
        low = next((t + 1 for t in range(start - 1, -1, -1) if heights[t] >= top), 0)
        high = next((t for t in range(end, len(heights)) if heights[t] >= top), len(heights))
        for t in (*range(low, start), *range(end, high)):
            left = self._left(t)
            if left > max(self.capacity - top, 0):
                floor = min(max(heights[a:b]) for i in self.unplaced for a, b in [self.lives[i]] if a <= t < b)
                if floor + left > self.capacity:
                    return floor + left
        return None

    def _left(self, t: int) -> int:
        return sum(self.nbytes[i] for i in self.unplaced if self.lives[i][0] <= t < self.lives[i][1])


def _lower_wall(lines: list[Line], line: Line) -> int:
    """The height of the lower neighbour of a line."""
    at = lines.index(line)
    return min(lines[k].height for k in (at - 1, at + 1) if 0 <= k < len(lines))


def _raise(lines: list[Line], line: Line, life: tuple[int, int], top: int) -> None:
    """Raise a part of the line, which leaves a line on each side of it."""
    at = lines.index(line)
    parts = [Line(line.start, life[0], line.height), Line(*life, top), Line(life[1], line.end, line.height)]
    lines[at : at + 1] = [part for part in parts if part.start < part.end]


def _merge(lines: list[Line]) -> None:
    """Make neighbouring lines of one height one."""
    for k in range(len(lines) - 1, 0, -1):
        if lines[k - 1].height == lines[k].height:
            lines[k - 1].end = lines.pop(k).end


def packer_of(problem: Problem, *, native: bool | None = None) -> Packer:
    """A packer of the blocks of a `solid` problem."""
    make = native_code.skyline_packer if native_code.chosen(native) else TwinPacker
    return make(problem.start, problem.end, problem.nbytes, problem.alignment)


def solid(problem: Problem) -> Problem:
    """A problem without gaps whose layouts are all layouts of `problem`, and none others for plain blocks.

    Blocks hold their place in their gaps, sizes are rounded up to what all alignments divide by, and only maximal
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

    `guarded`: look ahead to the capacity, by default the lower bound. Raises RequestError for an unknown key.
    """

    name = "skyline"
    summary = "the lowest place first, and on it the block with the largest key that fits"
    source = "Sekiyama et al., Profile-guided memory optimization (2018), section 3.2"
    handles_pins = False

    def __init__(self, key: str = "lifetime", *, guarded: bool = False, native: bool | None = None) -> None:
        if key not in KEYS:
            raise RequestError(f"no key {key!r}; there are {', '.join(KEYS)}")
        self.key, self.guarded, self.native = key, guarded, native
        self.name = f"{'guarded-' * guarded}skyline" + (f"-{key}" if key != "lifetime" else "")

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        filled = solid(problem)
        capacity = None
        if self.guarded:
            capacity = filled.lower_bound_bytes if limits.capacity_bytes is None else limits.capacity_bytes
        offsets = packer_of(filled, native=self.native).pack(KEYS[self.key](filled).astype(np.float64), capacity, None)
        return Packing(offsets, bound_bytes(problem))
