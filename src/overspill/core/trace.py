"""The Trace: which blocks are allocated on the device, how large, from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .saved import Saved


@dataclass(frozen=True)
class Block:
    """One allocation of `nbytes`, live in the half-open interval `[start, end)` of positions.

    `elastic`: the program tries to get it and goes another way when there is no room, as PyTorch does with the
    workspace of a convolution engine.
    """

    id: int
    start: int
    end: int
    nbytes: int
    name: str = ""
    stream: int = 0
    elastic: bool = False


@dataclass(frozen=True)
class Trace(Saved):
    """The allocations of one step; positions count instructions of a schedule or events of a real run."""

    blocks: tuple[Block, ...]

    @cached_property
    def events(self) -> tuple[tuple[int, int], ...]:
        """`(position, change in bytes)` in order; at one position frees come before allocations."""
        changes = [(b.start, b.nbytes) for b in self.blocks] + [(b.end, -b.nbytes) for b in self.blocks]
        return tuple(sorted(changes))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The largest number of live bytes at any position: no layout can be smaller."""
        return max(accumulate(change for _, change in self.events), default=0)
