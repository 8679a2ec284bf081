"""Peaks of the current plans, for a session or a train step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from overspill.plans.plan import Plan, most_known


class PlannedPeaks(ABC):
    """Base of objects with `plans`."""

    @property
    @abstractmethod
    def plans(self) -> list[Plan]:
        """The current plans, in the order they were made."""

    @property
    def peak_bytes(self) -> int:
        """The largest planned peak in bytes."""
        return max((plan.peak_bytes for plan in self.plans), default=0)

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes that PyTorch's allocator takes on the GPU by any plan.

        None if no plan is for a GPU.
        """
        return most_known(plan.reserved_bytes for plan in self.plans)

    @property
    def device_bytes(self) -> int | None:
        """The GPU memory that a plan needs at most: reserved bytes and the context."""
        return most_known(plan.device_bytes for plan in self.plans)
