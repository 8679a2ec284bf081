"""The Trace: blocks allocated on the device, with their sizes and lifetimes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

from .saved import Saved


class Mobility(IntEnum):
    """How long a block is expected to stay (Dymem §3.3.2); a hint for allocators.

    - `MOVABLE`: one layer waits for it, so it goes soon; also if nothing is known.
    - `TEMPORARY`: several layers need it, or it waits to be joined.
    - `RECLAIMED`: it is of a layer that is not selected for offloading.
    """

    MOVABLE = 0
    TEMPORARY = 1
    RECLAIMED = 2


@dataclass(frozen=True)
class Block:
    """One allocation of `nbytes`, live from position `start` until before `end`."""

    id: int
    start: int
    end: int
    nbytes: int
    name: str = ""
    stream: int = 0
    elastic: bool = False
    """Whether the program does without it if memory is short.

    PyTorch does so with the workspace of a convolution engine.
    """
    alignment: int = 1
    """Its address is a multiple of this."""
    pinned: int | None = None
    """The address that it must have, if any."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open intervals, in order and disjoint, in which it is dead and others may use its address.

    It returns to the same address. A block that may come back at another one is two blocks.
    """
    space: int = 0
    """The memory that it is in, if there are several."""
    mobility: Mobility = Mobility.MOVABLE
    """A hint for allocators that group blocks."""
    references: int = 0
    """The number of layers that need it, likewise a hint."""

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Half-open intervals in which the block is live, in order; none if it has no bytes or no time."""
        if not self.nbytes:
            return ()
        edges = [self.start, *(edge for gap in self.gaps for edge in gap), self.end]
        return tuple((low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high)


@dataclass(frozen=True)
class Trace(Saved):
    """Allocations of one step; positions count a schedule's instructions or a run's events."""

    blocks: tuple[Block, ...]

    @cached_property
    def spaces(self) -> tuple[int, ...]:
        """Numbers of the memories that blocks are in, in order."""
        return tuple(sorted({b.space for b in self.blocks}))

    @cached_property
    def events(self) -> tuple[tuple[int, int], ...]:
        """`(position, change in bytes)` of all spaces, frees first at a position."""
        return tuple(sorted(self._changes(self.blocks)))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Peak live bytes, summed over the spaces: no layout can be smaller."""
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
