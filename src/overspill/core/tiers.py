"""The Tiers of a store: which copies are on the disk below host memory, from when to when."""

from __future__ import annotations

from dataclasses import dataclass

from .saved import Saved


@dataclass(frozen=True)
class DiskStay:
    """One stay of a tensor's stored copy on the disk.

    All numbers are instructions of the schedule, each of a step that follows the last: a `read` below `write` is in the
    next step, and so is a `needed` below `read`.
    """

    tensor: int
    write: int
    """Before this instruction the copy begins to leave host memory."""
    read: int
    """Before this instruction it begins to come back."""
    needed: int
    """The Prefetch that reads it."""
    is_written: bool
    """Whether it is written here; False: the disk has this copy already."""


@dataclass(frozen=True)
class Tiers(Saved):
    """The stays on the disk with which a schedule's stored copies take at most `host_budget_bytes` of host memory."""

    host_budget_bytes: int
    host_peak_bytes: int
    """The most that copies take of host memory; over the budget if those in use at once do."""
    start_bytes: int
    """What they take at the start of each step."""
    disk_bytes: int
    """What the disk must hold."""
    least_moved_bytes: int
    """A bound: any choice of stays reads and writes as many bytes in a step, or more."""
    stays: tuple[DiskStay, ...] = ()
    ends: tuple[tuple[int, int], ...] = ()
    """Instructions at which a copy is needed no more, each with its tensor."""

    @property
    def fits(self) -> bool:
        """Whether host memory is large enough for copies that are in use at once."""
        return self.host_peak_bytes <= self.host_budget_bytes

    @property
    def written(self) -> tuple[int, ...]:
        """The tensors that are written to the disk in each step."""
        return tuple(stay.tensor for stay in self.stays if stay.is_written)
