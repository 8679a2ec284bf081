"""What a recording asks of an allocator on a given GPU: its allocations with all scratch resolved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.capture.recording import Recording
from overspill.core import Device
from overspill.costs.scratch import Software, elastic, scratch_bytes
from overspill.placement.events import ALLOCATE, FREE, TRY, Events

_GONE = -1


@dataclass(frozen=True, eq=False)
class Demand:
    """Allocations of a recording by position: when they start and end, their bytes, which may fail, their streams.

    Times are events of the recording; `count` is how many it has.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    elastic: NDArray[np.bool_]
    stream: NDArray[np.int32]
    count: int

    @cached_property
    def events(self) -> Events:
        """The allocations and frees in time order; `rows` says at which event of the recording each happens."""
        action = np.full(self.count, _GONE, dtype=np.int8)
        block = np.zeros(self.count, dtype=np.int64)
        nbytes = np.zeros(self.count, dtype=np.int64)
        wanted = np.flatnonzero(self.nbytes)
        starts = self.start[wanted]
        action[starts] = np.where(self.elastic[wanted], TRY, ALLOCATE)
        block[starts], nbytes[starts] = wanted, self.nbytes[wanted]
        ended = wanted[self.end[wanted] < self.count]
        action[self.end[ended]] = FREE
        block[self.end[ended]] = ended
        rows = self.rows
        return Events(action[rows], block[rows], nbytes[rows], self.stream[block[rows]])

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """For each of `events`, the event of the recording that it is."""
        wanted = np.flatnonzero(self.nbytes)
        ends = self.end[wanted]
        return np.sort(np.concatenate([self.start[wanted], ends[ends < self.count]]))

    def same_shape(self, other: Demand) -> bool:
        """Whether both ask for the same things at the same times, if not for the same sizes."""
        return (
            self.count == other.count
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.end, other.end)
            and np.array_equal(self.nbytes > 0, other.nbytes > 0)
        )

    def between(self, other: Demand, share: float) -> Demand:
        """The demand `share` of the way from this one to `other`, which has the same shape; beyond 1 it goes on."""
        sizes = self.nbytes + np.rint((other.nbytes - self.nbytes) * share).astype(np.int64)
        return Demand(self.start, self.end, np.maximum(sizes, 0), self.elastic, self.stream, self.count)


def demand_of(recording: Recording, device: Device, software: Software, *, choose: str = "central") -> Demand:
    """What `recording` asks for on `device`; `choose` is `low`, `central` or `high` where scratch is uncertain."""
    allocations = recording.allocations
    nbytes = np.fromiter((a.nbytes for a in allocations), dtype=np.int64, count=len(allocations))
    may_fail = np.zeros(len(allocations), dtype=np.bool_)
    for position, allocation in enumerate(allocations):
        if allocation.scratch is not None:
            bounds = scratch_bytes(allocation.scratch, device.compute_capability, software)
            nbytes[position] = getattr(bounds, choose)
            may_fail[position] = elastic(allocation.scratch)
    return Demand(
        np.fromiter((a.start for a in allocations), dtype=np.int64, count=len(allocations)),
        np.fromiter((a.end for a in allocations), dtype=np.int64, count=len(allocations)),
        nbytes,
        may_fail,
        np.fromiter((a.stream for a in allocations), dtype=np.int32, count=len(allocations)),
        recording.events,
    )
