"""The exact search's view of a problem: integer units, few sections, and sizes that include alignment waste."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem


@dataclass(frozen=True, eq=False)
class ExactModel:
    """The blocks of a problem in units of `unit` bytes."""

    problem: Problem
    unit: int
    sections: int
    pieces: Pieces
    """In the kept sections: those with a maximal set of live blocks, from which the others follow."""
    size: Integers
    """What a block takes from those above it: its bytes rounded up to an alignment that all its neighbours share."""
    alignment: Integers
    pinned: Integers

    @classmethod
    def of(cls, problem: Problem) -> ExactModel:
        """Return the model of `problem`."""
        pieces = Pieces.of(problem)
        kept = _maximal(pieces.start, pieces.end, problem.sections)
        pieces = Pieces(pieces.owner, np.searchsorted(kept, pieces.start), np.searchsorted(kept, pieces.end))
        # In the largest unit that divides everything.
        size = _taken(problem, pieces, kept.size)
        held = problem.pinned != ANYWHERE
        aligned = problem.alignment > 1
        unit = gcd(*size.tolist(), *problem.alignment[aligned].tolist(), *problem.pinned[held].tolist()) or 1
        return cls(
            problem=problem,
            unit=unit,
            sections=int(kept.size),
            pieces=pieces,
            size=size // unit,
            alignment=np.where(aligned, problem.alignment // unit, 1),
            pinned=np.where(held, problem.pinned // unit, ANYWHERE),
        )

    @cached_property
    def below(self) -> Integers:
        """For each block an equal one assumed to be below it, or -1, which breaks symmetries.

        Of blocks that are equal in units, those of more bytes are below, because they can go less high.
        """
        below = np.full(len(self.problem), -1, dtype=np.int64)
        last: dict[tuple[int | tuple[int, int], ...], int] = {}
        runs: list[list[tuple[int, int]]] = [[] for _ in below]
        pieces = self.pieces
        for owner, *run in zip(pieces.owner.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True):
            runs[owner].append((run[0], run[1]))
        for block in np.argsort(-self.problem.nbytes, kind="stable").tolist():
            if runs[block] and self.pinned[block] == ANYWHERE:
                key = (int(self.size[block]), int(self.alignment[block]), *runs[block])
                below[block] = last.get(key, -1)
                last[key] = block
        return below

    @cached_property
    def step_bytes(self) -> int:
        """A divisor of every peak that matters: of layouts in which all blocks are as low as they can be."""
        return gcd(self.unit, *self.problem.nbytes.tolist())

    @cached_property
    def _spare(self) -> Integers:
        """Bytes by which each section's sizes overstate its topmost block."""
        spare = np.zeros(self.sections, dtype=np.int64)
        over = self.size * self.unit - self.problem.nbytes
        for row in np.flatnonzero(over[self.pieces.owner]).tolist():
            within = slice(self.pieces.start[row], self.pieces.end[row])
            spare[within] = np.maximum(spare[within], over[self.pieces.owner[row]])
        return spare

    def highest(self, capacity_bytes: int) -> Integers:
        """Return each block's largest offset within a capacity, in units; negative if it has none."""
        highest = (capacity_bytes - self.problem.nbytes) // self.unit
        return np.where(self.pinned == ANYWHERE, highest, np.where(self.pinned <= highest, self.pinned, -1))

    def ceiling(self, capacity_bytes: int) -> Integers:
        """Return the limit on floor plus sizes in each section within a capacity, in units."""
        return (capacity_bytes + self._spare) // self.unit


def _maximal(start: Integers, end: Integers, sections: int) -> Integers:
    """Return sections whose live blocks are not all live in a neighbouring one.

    They are the last before an end after a start.
    """
    time = np.arange(sections + 1)
    starts, ends = np.isin(time, start), np.isin(time, end)
    last_start = np.maximum.accumulate(np.where(starts, time, -1))
    last_end = np.maximum.accumulate(np.where(ends, time, 0))
    return np.flatnonzero(ends[1:] & (last_start[:-1] >= last_end[:-1]))


def _taken(problem: Problem, pieces: Pieces, sections: int) -> Integers:
    """Return the bytes from each block's offset to the lowest place of one above it."""
    if (problem.alignment == problem.alignment[:1]).all():
        return _rounded_up(problem.nbytes, problem.alignment)
    rows = list(zip(pieces.owner.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True))
    shared = np.zeros(sections, dtype=np.int64)
    for block, start, end in rows:
        shared[start:end] = np.gcd(shared[start:end], problem.alignment[block])
    step = problem.alignment.copy()
    for block, start, end in rows:
        step[block] = gcd(int(step[block]), int(np.gcd.reduce(shared[start:end])))
    return _rounded_up(problem.nbytes, step)


def _rounded_up(nbytes: Integers, step: Integers) -> Integers:
    return -(-nbytes // step) * step
