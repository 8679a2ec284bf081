"""What plans in force take at most: of a session's models, or of a train step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from overspill.plans.plan import Plan, most_known


class PlannedPeaks(ABC):
    """Whoever has `plans` in force."""

    @property
    @abstractmethod
    def plans(self) -> list[Plan]:
        """The plans in force, in the order in which they were made."""

    @property
    def peak_bytes(self) -> int:
        """The planned peak of the whole step."""
        return max((plan.peak_bytes for plan in self.plans), default=0)

    @property
    def reserved_bytes(self) -> int | None:
        """The most that PyTorch's allocator takes from the card by any plan; None where no plan is for a card."""
        return most_known(plan.reserved_bytes for plan in self.plans)

    @property
    def device_bytes(self) -> int | None:
        """The same with the context: what the card must have."""
        return most_known(plan.device_bytes for plan in self.plans)
