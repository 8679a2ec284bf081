"""A recording's allocations on a given GPU, scratch sizes included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.core.errors import OutOfMemoryError
from overspill.costs.scratch import LARGE_GPU, Software, elastic, scratch_bytes
from overspill.placement.allocators.result import Replay
from overspill.placement.events import ALLOCATE, FREE, TRY, Events
from overspill.placement.replay import replay

_GONE = -1


@dataclass(frozen=True, eq=False)
class Demand:
    """The allocations of a recording, in columns by position, `[allocations]`; times are events of the recording."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    scratch: NDArray[np.bool_]
    """Whether a library requests it."""
    elastic: NDArray[np.bool_]
    """Whether the request may fail."""
    stream: NDArray[np.int32]
    count: int
    """The number of events of the recording."""

    @cached_property
    def events(self) -> Events:
        """The allocations and frees in time order; `rows` has for each its event of the recording."""
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
        """For each of `events`, its event of the recording."""
        wanted = np.flatnonzero(self.nbytes)
        ends = self.end[wanted]
        return np.sort(np.concatenate([self.start[wanted], ends[ends < self.count]]))

    def same_shape(self, other: Demand) -> bool:
        """Return whether two demands differ at most in sizes: they allocate the same things at the same times."""
        return (
            self.count == other.count
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.end, other.end)
            and np.array_equal(self.nbytes > 0, other.nbytes > 0)
        )

    def confirmed_by(self, probe: Demand, starts: Sequence[int]) -> Demand | None:
        """Return this demand if a recording of one iteration agrees; otherwise None.

        `probe` is of the first iteration alone, with the same requests. Starts, sizes and ends must be equal up to the
        last allocation before the second of `starts`. Later frees, where the probe ends, prove nothing. Scratch may
        differ, since some of it grows in steps. The result then has the probe's scratch sizes, in later iterations too,
        where the same libraries get the same requests.
        """
        until = starts[1] if len(starts) > 1 else self.count
        count = int(np.searchsorted(self.start, until))
        if not count or len(probe.start) < count:
            return None
        last = self.start[count - 1]
        tensors = ~self.scratch[:count]
        if not (
            np.array_equal(self.start[:count], probe.start[:count])
            and np.array_equal(self.scratch[:count], probe.scratch[:count])
            and np.array_equal(self.nbytes[:count][tensors], probe.nbytes[:count][tensors])
            and np.array_equal(np.minimum(self.end[:count], last), np.minimum(probe.end[:count], last))
        ):
            return None
        sizes = self.nbytes.copy()
        sizes[:count] = probe.nbytes[:count]
        # Scratch that ends at once is a call's; the rest is a handle's, and is not taken again.
        calls = self.scratch & (self.end == self.start + 1)
        asked = probe.nbytes[:count][calls[:count] & (self.start[:count] >= starts[0])]
        for begin, end in pairwise([*starts[1:], self.count]):
            again = np.flatnonzero(calls & (self.start >= begin) & (self.start < end))
            if len(again) != len(asked):
                return None
            sizes[again] = asked
        return replace(self, nbytes=sizes)

    def between(self, other: Demand, share: float) -> Demand:
        """Return the demand at `share` of the distance from this one to `other`, which has the same shape.

        `share` may be above 1.
        """
        sizes = self.nbytes + np.rint((other.nbytes - self.nbytes) * share).astype(np.int64)
        return replace(self, nbytes=np.maximum(sizes, 0))


def demand_of(recording: Recording, device: Device, software: Software) -> Demand:
    """Return the demand of `recording` on `device`, the likeliest one where scratch is uncertain."""
    allocations = recording.allocations
    # Sizes of scratch depend on the GPU and the software.
    nbytes = np.fromiter((a.nbytes for a in allocations), dtype=np.int64, count=len(allocations))
    may_fail = np.zeros(len(allocations), dtype=np.bool_)
    for position, allocation in enumerate(allocations):
        if allocation.scratch is not None:
            nbytes[position] = scratch_bytes(
                allocation.scratch, device.compute_capability, software, device.multiprocessors or LARGE_GPU
            ).central
            may_fail[position] = elastic(allocation.scratch)
    return Demand(
        np.fromiter((a.start for a in allocations), dtype=np.int64, count=len(allocations)),
        np.fromiter((a.end for a in allocations), dtype=np.int64, count=len(allocations)),
        nbytes,
        np.fromiter((a.scratch is not None for a in allocations), dtype=np.bool_, count=len(allocations)),
        may_fail,
        np.fromiter((a.stream for a in allocations), dtype=np.int32, count=len(allocations)),
        recording.events,
    )


def served(demand: Demand, room: int, allocator: str = "pytorch", config: Any = None) -> Replay:
    """Return the allocator's answer to `demand` with `room` bytes, or without a limit if that is too little.

    Near the limit PyTorch frees cached memory before it fails, and reserves less than where memory is plenty.
    """
    unlimited = replay(demand.events, allocator, config=config)
    if unlimited.peak_device_bytes <= room or room <= 0:
        return unlimited
    limited = replay(demand.events, allocator, capacity_bytes=room, config=config)
    return limited if limited.fits else unlimited


def survives(demand: Demand, device: Device, outside_bytes: int, allocator: str, config: Any) -> bool:
    """Return whether the allocator can serve `demand` on `device`, of whose memory `outside_bytes` are in use."""
    capacity = device.memory_bytes - outside_bytes
    if capacity <= 0:
        return False
    try:
        return replay(demand.events, allocator, capacity_bytes=capacity, config=config).fits
    except OutOfMemoryError:
        return False
