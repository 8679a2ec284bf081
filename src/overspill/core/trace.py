"""The Trace: which blocks are allocated on the device, how large, from when to when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

from .saved import Saved


class Mobility(IntEnum):
    """How long a block stays, as far as is known beforehand (Dymem §3.3.2): what allocators may group blocks by.

    `MOVABLE`: one layer waits for it, so it goes soon; also what nothing is known of. `TEMPORARY`: several layers need
    it, or it waits to be joined. `RECLAIMED`: of a layer that is not selected for offloading.
    """

    MOVABLE = 0
    TEMPORARY = 1
    RECLAIMED = 2


@dataclass(frozen=True)
class Block:
    """One allocation of `nbytes`, live in the half-open interval `[start, end)` of positions.

    `elastic`: the program tries to get it and goes another way when there is no room, as PyTorch does with the
    workspace of a convolution engine. `alignment`: its address is a multiple of this. `pinned`: the address that it must
    have, if any. `gaps`: half-open intervals, in order and apart, in which it is dead and others may use its place, but
    to which it returns; a block that may come back elsewhere is two blocks. `space`: which of several memories it is in.
    `mobility` and `references`, how many layers need it: hints for allocators that group blocks.
    """

    id: int
    start: int
    end: int
    nbytes: int
    name: str = ""
    stream: int = 0
    elastic: bool = False
    alignment: int = 1
    pinned: int | None = None
    gaps: tuple[tuple[int, int], ...] = ()
    space: int = 0
    mobility: Mobility = Mobility.MOVABLE
    references: int = 0

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The half-open intervals in which the block is live, in order; none for a block of no bytes or no time."""
        if not self.nbytes:
            return ()
        edges = [self.start, *(edge for gap in self.gaps for edge in gap), self.end]
        return tuple((low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high)


@dataclass(frozen=True)
class Trace(Saved):
    """The allocations of one step; positions count instructions of a schedule or events of a real run."""

    blocks: tuple[Block, ...]

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """The memories that blocks are in, in order."""
        return tuple(sorted({b.space for b in self.blocks}))

    @cached_property
    def events(self) -> tuple[tuple[int, int], ...]:
        """`(position, change in bytes)` in order, of all spaces; at one position frees come before allocations."""
        return tuple(sorted(self._changes(self.blocks)))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The largest number of live bytes at any position, summed over the spaces: no layout can be smaller."""
        by_space: dict[int, list[Block]] = defaultdict(list)
        for block in self.blocks:
            by_space[block.space].append(block)
        return sum(
            max(accumulate(change for _, change in sorted(self._changes(blocks))), default=0)
            for blocks in by_space.values()
        )

    @staticmethod
    def _changes(blocks: Iterable[Block]) -> Iterator[tuple[int, int]]:
        for block in blocks:
            for start, end in block.pieces:
                yield start, block.nbytes
                yield end, -block.nbytes
