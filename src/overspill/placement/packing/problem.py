"""The blocks of one space as arrays, with time in sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from overspill.core import Trace

from .columns import ANYWHERE, Columns, Integers


@dataclass(frozen=True, eq=False)
class Problem:
    """Dynamic storage allocation in one space: an address for each of n blocks.

    Time is cut into *sections* wherever a block begins or ends to live. So `start` and `end` are half-open ranges of
    sections. All blocks have bytes and time. A block may also be dead in gaps: those of block i are rows `gap_first[i]`
    to `gap_first[i + 1]` of `gap_start` and `gap_end`, in sections.
    """

    index: Integers
    """The block's position in the trace."""
    start: Integers
    end: Integers
    nbytes: Integers
    alignment: Integers
    pinned: Integers
    lifetime: Integers
    """The block's length in positions of the trace."""
    gap_first: Integers
    gap_start: Integers
    gap_end: Integers

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, blocks: Trace | Columns, space: int = 0) -> Problem:
        """Return the problem of one `space`, without blocks of no bytes or no time.

        Raises RequestError for a block that cannot be placed: of negative size, badly aligned, with gaps out of order,
        or ending before it starts.
        """
        # Choose the blocks of this space that need a place.
        columns = Columns.of(blocks) if isinstance(blocks, Trace) else blocks
        columns.refuse_flaws()
        chosen = np.flatnonzero((columns.space == space) & columns.live)
        # Number the times at which blocks or gaps begin and end.
        start, end = columns.start[chosen], columns.end[chosen]
        gaps, gap_first = columns.gaps_of(chosen)
        gap_start, gap_end = columns.gap_start[gaps], columns.gap_end[gaps]
        start_at, end_at, gap_start_at, gap_end_at = _sections_of(start, end, gap_start, gap_end)
        return cls(
            index=chosen,
            start=start_at,
            end=end_at,
            nbytes=columns.nbytes[chosen],
            alignment=columns.alignment[chosen],
            pinned=columns.pinned[chosen],
            lifetime=end - start,
            gap_first=gap_first,
            gap_start=gap_start_at,
            gap_end=gap_end_at,
        )

    @cached_property
    def unit_bytes(self) -> int:
        """The greatest common divisor of sizes, alignments and pinned addresses."""
        aligned, held = self.alignment[self.alignment > 1], self.pinned[self.pinned != ANYWHERE]
        return int(np.gcd.reduce(np.concatenate([self.nbytes, aligned, held]))) or 1

    def in_units(self) -> Problem:
        """Return the problem with sizes, alignments and pins in `unit_bytes`."""
        unit = self.unit_bytes
        return replace(
            self,
            nbytes=self.nbytes // unit,
            alignment=np.maximum(self.alignment // unit, 1),
            pinned=np.where(self.pinned == ANYWHERE, ANYWHERE, self.pinned // unit),
        )

    @cached_property
    def sections(self) -> int:
        """The number of sections."""
        return int(self.end.max(initial=0))

    @cached_property
    def load(self) -> Integers:
        """Live bytes in each section."""
        change = np.zeros(self.sections + 1, dtype=np.int64)
        np.add.at(change, self.start, self.nbytes)
        np.add.at(change, self.end, -self.nbytes)
        gone = np.repeat(self.nbytes, np.diff(self.gap_first))
        np.add.at(change, self.gap_start, -gone)
        np.add.at(change, self.gap_end, gone)
        return np.cumsum(change)[:-1]

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The largest load, or the highest pinned block's end: no layout is smaller."""
        held = self.pinned != ANYWHERE
        return int(max(self.load.max(initial=0), (self.pinned + self.nbytes)[held].max(initial=0)))

    @property
    def plain(self) -> bool:
        """Whether no block is aligned, pinned or has a gap."""
        return not (self.gap_start.size or (self.alignment > 1).any() or (self.pinned != ANYWHERE).any())

    def peak_bytes(self, offsets: Sequence[int] | Integers) -> int:
        """Return the highest end of a block, with block i at `offsets[i]`."""
        return int((np.asarray(offsets, dtype=np.int64) + self.nbytes).max(initial=0))


def _sections_of(*edges: Integers) -> list[Integers]:
    """Return all times as positions among the distinct ones, by column, in linear time if they are dense."""
    every = np.concatenate(edges)
    first = int(every.min(initial=0))
    length = int(every.max(initial=0)) - first + 1
    if length > 4 * len(every):
        times = np.unique(every)
        return [np.searchsorted(times, column) for column in edges]
    seen = np.zeros(length, dtype=np.int64)
    seen[every - first] = 1
    place = np.cumsum(seen) - 1
    return [place[column - first] for column in edges]
