"""The blocks of a trace as arrays, for millions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Trace
from overspill.core.errors import InvalidLayoutError, RequestError

from ._packing import check_layout

Integers = NDArray[np.int64]
ANYWHERE = -1
"""The pinned address of a block without a pin."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The blocks of a trace by position, `[blocks]`; fields as in `core.Block`.

    Block i is dead in the gaps `gap_first[i]` to `gap_first[i + 1]`.
    """

    start: Integers
    end: Integers
    nbytes: Integers
    alignment: Integers
    pinned: Integers
    """ANYWHERE for a block without an address."""
    space: Integers
    gap_first: Integers
    gap_start: Integers
    gap_end: Integers

    @classmethod
    def of(cls, trace: Trace) -> Columns:
        """Return the blocks of `trace`. Raises RequestError for an address below 0."""
        blocks = trace.blocks
        for block in blocks:
            if block.pinned is not None and block.pinned < 0:
                raise _badly_placed(block.id, block.alignment, block.pinned)
        # One array for each field; all gaps in one list.
        gaps = [gap for b in blocks for gap in b.gaps]
        return cls(
            start=_integers([b.start for b in blocks]),
            end=_integers([b.end for b in blocks]),
            nbytes=_integers([b.nbytes for b in blocks]),
            alignment=_integers([b.alignment for b in blocks]),
            pinned=_integers([ANYWHERE if b.pinned is None else b.pinned for b in blocks]),
            space=_integers([b.space for b in blocks]),
            gap_first=np.cumsum(_integers([0, *(len(b.gaps) for b in blocks)])),
            gap_start=_integers([gap[0] for gap in gaps]),
            gap_end=_integers([gap[1] for gap in gaps]),
        )

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """The memory spaces that blocks are in, in order."""
        return tuple(np.unique(self.space).tolist())

    @cached_property
    def live(self) -> NDArray[np.bool_]:
        """Which blocks have bytes, and a time at which they are live; others take nothing."""
        gone = np.concatenate([_integers([0]), np.cumsum(self.gap_end - self.gap_start)])[self.gap_first]
        return (self.nbytes > 0) & (self.end - self.start > np.diff(gone))

    def peaks(self, offsets: Integers) -> dict[int, int]:
        """Return the peak bytes of each space, with block i at `offsets[i]`."""
        tops = np.where(self.live, offsets + self.nbytes, 0)
        return {space: int(tops[self.space == space].max()) for space in self.spaces}

    def trace(self, names: Sequence[str] = ()) -> Trace:
        """Return the blocks as a Trace, with positions as ids."""
        gaps = list(zip(self.gap_start.tolist(), self.gap_end.tolist(), strict=True))
        first = self.gap_first.tolist()
        columns = (self.start, self.end, self.nbytes, self.alignment, self.pinned, self.space)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return Trace(
            tuple(
                Block(
                    i,
                    start,
                    end,
                    nbytes,
                    name=names[i] if names else "",
                    alignment=alignment,
                    pinned=None if pinned == ANYWHERE else pinned,
                    gaps=tuple(gaps[first[i] : first[i + 1]]),
                    space=space,
                )
                for i, (start, end, nbytes, alignment, pinned, space) in enumerate(rows)
            )
        )

    def only(self, blocks: Integers) -> Columns:
        """Return some blocks, at these positions."""
        gaps, first = self.gaps_of(blocks)
        return Columns(
            self.start[blocks],
            self.end[blocks],
            self.nbytes[blocks],
            self.alignment[blocks],
            self.pinned[blocks],
            self.space[blocks],
            first,
            self.gap_start[gaps],
            self.gap_end[gaps],
        )

    def gaps_of(self, blocks: Integers) -> tuple[Integers, Integers]:
        """Return the gap rows of some blocks, and where those of each begin."""
        counts = np.diff(self.gap_first)[blocks]
        first = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(first[-1]) - np.repeat(first[:-1], counts) + np.repeat(self.gap_first[blocks], counts)
        return rows, first

    def refuse_flaws(self) -> None:
        """Raise RequestError for an invalid block.

        Its size is negative, it is badly aligned, its gaps are out of order, or it ends too soon.
        """
        if (flawed := np.flatnonzero(self.nbytes < 0)).size:
            i = int(flawed[0])
            raise RequestError(f"block {i} has {self.nbytes[i]} bytes; a size cannot be negative")
        # Lifetimes and gaps are in order.
        owner = np.repeat(np.arange(len(self)), np.diff(self.gap_first))
        wrong = self.end < self.start
        inside = (self.start[owner] <= self.gap_start) & (self.gap_start <= self.gap_end)
        inside &= self.gap_end <= self.end[owner]
        inside[1:] &= (owner[1:] != owner[:-1]) | (self.gap_end[:-1] <= self.gap_start[1:])
        wrong[owner[~inside]] = True
        if (flawed := np.flatnonzero(wrong)).size:
            i = int(flawed[0])
            gaps = slice(self.gap_first[i], self.gap_first[i + 1])
            pairs = tuple(zip(self.gap_start[gaps].tolist(), self.gap_end[gaps].tolist(), strict=True))
            raise RequestError(f"block {i} lives in [{self.start[i]}, {self.end[i]}) with gaps {pairs}")
        # Alignments and pins agree.
        bad = (self.alignment < 1) | (self.pinned < ANYWHERE)
        bad |= (self.pinned != ANYWHERE) & (self.pinned % np.maximum(self.alignment, 1) != 0)
        if (flawed := np.flatnonzero(bad)).size:
            i = int(flawed[0])
            raise _badly_placed(i, int(self.alignment[i]), int(self.pinned[i]))

    def validate(self, offsets: Integers, peak_bytes: int, lower_bound_bytes: int) -> None:
        """Raise InvalidLayoutError unless block i can be at `offsets[i]`.

        It checks as Layout.validate does, in native code.
        """
        if (offsets < 0).any() or (offsets % self.alignment).any():
            raise InvalidLayoutError("an offset is negative, or no multiple of its alignment")
        if ((self.pinned != ANYWHERE) & (self.pinned != offsets)).any():
            raise InvalidLayoutError("a pinned block lies elsewhere")
        top, bound = self.refuse_overlaps(offsets)
        if (top, bound) != (peak_bytes, lower_bound_bytes):
            raise InvalidLayoutError(
                f"peak {peak_bytes} and bound {lower_bound_bytes} are claimed of {top} and {bound}"
            )

    def refuse_overlaps(self, offsets: Integers) -> tuple[int, int]:
        """Return the peak and most live bytes, summed over the spaces.

        Raises InvalidLayoutError if live blocks overlap.
        """
        bound = 0
        for space in self.spaces:
            inside = np.flatnonzero(self.space == space)
            gaps, first = self.gaps_of(inside)
            clash, live = check_layout(
                self.start[inside],
                self.end[inside],
                self.nbytes[inside],
                offsets[inside],
                first,
                self.gap_start[gaps],
                self.gap_end[gaps],
            )
            if clash is not None:
                one, two = (int(inside[block]) for block in clash)
                raise InvalidLayoutError(f"the blocks at positions {one} and {two} overlap")
            bound += live
        return sum(self.peaks(offsets).values()), bound


def _badly_placed(block: int, alignment: int, pinned: int) -> RequestError:
    where = f" at address {pinned}" if pinned != ANYWHERE else ""
    return RequestError(f"block {block} cannot be aligned to {alignment} bytes{where}")


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, dtype=np.int64)
