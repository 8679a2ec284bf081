"""Peaks of the current plans, of a session's models or a train step."""

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
        """The most bytes that PyTorch's allocator takes of the card by any plan.

        None where no plan is for a card.
        """
        return most_known(plan.reserved_bytes for plan in self.plans)

    @property
    def device_bytes(self) -> int | None:
        """The same with the context: bytes that the card must have."""
        return most_known(plan.device_bytes for plan in self.plans)
