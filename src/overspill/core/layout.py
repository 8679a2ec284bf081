"""The Layout: an address for every block of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidLayout
from .saved import Saved
from .trace import Trace


@dataclass(frozen=True)
class Layout(Saved):
    """`offsets[i]` is the address of block `i` of the trace, by position; made by `solver`."""

    solver: str
    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of the peak that no live byte ever needed: 0 when the layout meets the lower bound."""
        return 1 - self.lower_bound_bytes / self.peak_bytes if self.peak_bytes else 0.0

    def validate(self, trace: Trace) -> None:
        """Raise InvalidLayout unless live blocks never overlap and the peaks are what the layout says."""
        if len(self.offsets) != len(trace.blocks):
            raise InvalidLayout(f"{len(self.offsets)} offsets for {len(trace.blocks)} blocks")
        if any(offset < 0 for offset in self.offsets):
            raise InvalidLayout(f"negative offset {min(self.offsets)}")
        pairs = list(zip(self.offsets, trace.blocks, strict=True))
        # A block of no bytes or no time lies nowhere and overlaps nothing.
        placed = sorted((p for p in pairs if p[1].nbytes and p[1].end > p[1].start), key=lambda pair: pair[1].start)
        live: list[tuple[int, int, int, int]] = []  # (offset, limit, end, id)
        for offset, block in placed:
            live = [other for other in live if other[2] > block.start]
            for low, high, _, other_id in live:
                if offset < high and low < offset + block.nbytes:
                    raise InvalidLayout(
                        f"blocks {other_id} [{low}, {high}) and {block.id} [{offset}, {offset + block.nbytes}) overlap"
                    )
            live.append((offset, offset + block.nbytes, block.end, block.id))
        top = max((o + b.nbytes for o, b in pairs), default=0)
        if top != self.peak_bytes:
            raise InvalidLayout(f"the layout reaches {top} bytes but claims a peak of {self.peak_bytes}")
        if self.lower_bound_bytes != trace.lower_bound_bytes:
            raise InvalidLayout(f"lower bound {self.lower_bound_bytes} is not the trace's {trace.lower_bound_bytes}")
