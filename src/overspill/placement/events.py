"""Allocations and frees in time order, as arrays, for replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overspill.core import Mobility, Trace
from overspill.core.errors import RequestError

ALLOCATE, FREE, TRY, EMPTY = 0, 1, 2, 3
"""Actions of an event.

TRY is an elastic allocation: if memory is short, it and its free are skipped. EMPTY gives cached memory back to the
device, as torch.cuda.empty_cache does; its block means nothing, and no other event has it.
"""

COLUMNS: dict[str, type[np.signedinteger]] = {
    "action": np.int8, "block": np.int64, "nbytes": np.int64, "stream": np.int32, "mobility": np.int8,
}  # fmt: skip
"""The arrays of Events, in order, and their dtypes."""
MOST_BLOCKS = 1 << 31
"""Most blocks; they are indices of arrays, so a large number would take much memory."""


@dataclass(frozen=True, eq=False)
class Events:
    """Allocations and frees in time order, `[events]`.

    Event `i` does `action[i]` to `block[i]`. A block may be allocated again once it is free.
    """

    action: NDArray[np.int8]
    block: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    """The requested size; ignored for FREE."""
    stream: NDArray[np.int32]
    """The stream that the block belongs to."""
    mobility: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    """The Mobility by which allocators may group the block; empty: all are movable."""

    def __post_init__(self) -> None:
        for name, kind in COLUMNS.items():
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name), kind))
        if not len(self.mobility):
            object.__setattr__(self, "mobility", np.zeros(len(self.action), dtype=np.int8))
        # All arrays have one length, and possible values.
        lengths = {len(getattr(self, name)) for name in COLUMNS}
        if len(lengths) > 1:
            raise RequestError(f"events need arrays of one length, not of {', '.join(map(str, sorted(lengths)))}")
        self._refuse((self.action < ALLOCATE) | (self.action > EMPTY), "has an action other than 0, 1, 2 or 3")
        self._refuse(self.block < 0, "has a negative block")
        self._refuse(self.block >= MOST_BLOCKS, f"has a block above {MOST_BLOCKS - 1}; number blocks from 0")
        self._refuse(self.nbytes < 0, "has a negative size")
        self._refuse(self.stream < 0, "has a negative stream")
        known = (self.mobility >= min(Mobility)) & (self.mobility <= max(Mobility))
        self._refuse(~known, f"has a mobility other than {', '.join(map(str, map(int, Mobility)))}")

    def __len__(self) -> int:
        return len(self.action)

    @property
    def block_count(self) -> int:
        """One more than the largest block index."""
        return int(self.block.max()) + 1 if len(self) else 0

    @property
    def peak_requested_bytes(self) -> int:
        """Peak bytes of live blocks without elastic ones: no allocator needs less."""
        order = np.argsort(self.block, kind="stable")
        block, action, nbytes = self.block[order], self.action[order], self.nbytes[order]
        change = np.where(action == ALLOCATE, nbytes, 0)
        # In the order of blocks, what a free takes away is what the event before it brought.
        same = block[1:] == block[:-1]
        change[1:] = np.where((action[1:] == FREE) & same, -change[:-1], change[1:])
        in_time = np.empty_like(change)
        in_time[order] = change
        return max(0, int(np.cumsum(in_time).max(initial=0)))

    @classmethod
    def of(cls, trace: Trace, *, by_references: bool = False) -> Events:
        """Return the events of `trace`, with blocks by position.

        At one position frees come before allocations. `by_references` orders the blocks that are allocated at one
        position: those that more layers need first, and of these the ones that stay longer (Dymem §3.3.3).
        """
        starts = [
            (b.start, 1, *((-b.references, -b.end) if by_references else ()), i) for i, b in enumerate(trace.blocks)
        ]
        ends = [(b.end, 0, i) for i, b in enumerate(trace.blocks) if b.end > b.start]
        # A block of no time is allocated and freed at once.
        instants = {i for i, b in enumerate(trace.blocks) if b.end <= b.start}
        # One row for each allocation and free, in time order.
        rows: list[tuple[int, int, int, int]] = []
        for _, allocates, *_, i in sorted([*starts, *ends]):
            block = trace.blocks[i]
            if not allocates:
                rows.append((FREE, i, 0, block.stream))
                continue
            rows.append((TRY if block.elastic else ALLOCATE, i, block.nbytes, block.stream))
            if i in instants:
                rows.append((FREE, i, 0, block.stream))
        return cls.from_rows(rows, [trace.blocks[row[1]].mobility for row in rows])

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, int, int, int]], mobility: Sequence[int] | None = None) -> Events:
        """Return events from rows `(action, block, nbytes, stream)`.

        `mobility` is that of each; None: all are movable.
        """
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
        action, block, nbytes, stream = table.T
        groups = np.array(mobility or [], dtype=np.int8)
        return cls(action.astype(np.int8), block, nbytes, stream.astype(np.int32), groups)

    def repeated(self, times: int) -> Events:
        """Return the events `times` in a row; all blocks must be free at the end."""
        return Events(*(np.tile(getattr(self, name), times) for name in COLUMNS))

    def _refuse(self, wrong: NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise RequestError(f"event {int(wrong.argmax())} {what}")


def _whole_numbers(name: str, values: ArrayLike, kind: type[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Return `values` as one contiguous array of `kind`. Raises RequestError if it holds anything else."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"the {name} of events must be one row of whole numbers, not {array.dtype} {array.shape}")
    limits = np.iinfo(kind)
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise RequestError(f"the {name} of events must fit {np.dtype(kind).name}")
    return np.ascontiguousarray(array, dtype=kind)
