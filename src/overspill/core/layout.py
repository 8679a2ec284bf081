"""The Layout: an address for every block of a trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import InvalidLayoutError
from .saved import Saved
from .trace import Block, Trace


@dataclass(frozen=True)
class Layout(Saved):
    """Addresses for the blocks of a trace, found by `solver`."""

    solver: str
    offsets: tuple[int, ...]
    """The address of block `i`, in bytes within the block's space."""
    peak_bytes: int
    """The highest end of any block that is live at some time, summed over the spaces."""
    lower_bound_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of the peak lost to fragmentation, 0 at the lower bound."""
        return 1 - self.lower_bound_bytes / self.peak_bytes if self.peak_bytes else 0.0

    def validate(self, trace: Trace) -> None:
        """Check that live blocks never overlap, constraints hold and peaks are right. Raises InvalidLayoutError."""
        if len(self.offsets) != len(trace.blocks):
            raise InvalidLayoutError(f"{len(self.offsets)} offsets for {len(trace.blocks)} blocks")
        # Constraints of single blocks.
        for offset, block in zip(self.offsets, trace.blocks, strict=True):
            if offset < 0:
                raise InvalidLayoutError(f"negative offset {offset} of block {block.id}")
            if offset % block.alignment:
                raise InvalidLayoutError(f"block {block.id} at {offset} is not aligned to {block.alignment} bytes")
            if block.pinned not in (None, offset):
                raise InvalidLayoutError(f"block {block.id} at {offset} is pinned to {block.pinned}")
        # Overlaps and peaks, in each space.
        top = 0
        for space in trace.spaces:
            inside = [(o, b) for o, b in zip(self.offsets, trace.blocks, strict=True) if b.space == space]
            _refuse_overlaps(inside)
            top += max((o + b.nbytes for o, b in inside if b.pieces), default=0)
        if top != self.peak_bytes:
            raise InvalidLayoutError(f"the layout reaches {top} bytes but claims a peak of {self.peak_bytes}")
        if self.lower_bound_bytes != trace.lower_bound_bytes:
            raise InvalidLayoutError(
                f"lower bound {self.lower_bound_bytes} is not the trace's {trace.lower_bound_bytes}"
            )


@dataclass(frozen=True)
class Places:
    """The addresses of a schedule's blocks in an arena of `arena_bytes`."""

    offsets: dict[tuple[int, int], int]
    """Bytes, by tensor and by the position in the schedule that allocates it."""
    arena_bytes: int
    outside_bytes: int
    """The most that is live outside the arena at any time."""
    retained_bytes: int = 0
    """How much of `outside_bytes` exists between forward and backward, without persistent tensors."""
    between: dict[int, int] = field(default_factory=dict)
    """Offsets of the tensors that are in the arena between steps."""

    @property
    def total_bytes(self) -> int:
        """Bytes needed of the device: the arena, which always stays, and the rest."""
        return self.arena_bytes + self.outside_bytes


def _refuse_overlaps(placed: Sequence[tuple[int, Block]]) -> None:
    """Raise InvalidLayoutError if two blocks of one space are live at one address at once.

    It sweeps over time with the live blocks in order of address. They do not overlap, so a new block can only overlap
    its neighbours.
    """
    # Allocations and frees of all pieces, in order of time.
    changes: list[tuple[int, bool, int, int, int]] = []
    for offset, block in placed:
        for start, end in block.pieces:
            changes.append((start, True, offset, offset + block.nbytes, block.id))
            changes.append((end, False, offset, offset + block.nbytes, block.id))
    live: list[tuple[int, int, int]] = []
    for _, allocated, low, high, block_id in sorted(changes):
        at = bisect_left(live, (low, high, block_id))
        if not allocated:
            del live[at]
            continue
        for other_low, other_high, other_id in live[max(at - 1, 0) : at + 1]:
            if low < other_high and other_low < high:
                raise InvalidLayoutError(
                    f"blocks {other_id} [{other_low}, {other_high}) and {block_id} [{low}, {high}) overlap"
                )
        live.insert(at, (low, high, block_id))
