"""What a policy is: a function from a graph, a device and a budget to a Schedule, with a name and declared capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from overspill.core import Device, Graph, Schedule, Tensor
from overspill.costs import MeasuredTimes, op_seconds

from .program import Gap, Program

SMALLEST_MOVE_BYTES = 1024
"""Smaller tensors stay: a transfer's fixed cost outweighs so little."""


class Policy(ABC):
    """One way to keep a step in memory. Subclasses decide in `_plan`; every schedule passes `simulate.check` before use."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    offloads: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    plans_for_budget: ClassVar[bool] = False
    """Whether the policy adapts to the budget; the others make one schedule, which fits or does not."""

    def plan(
        self, graph: Graph, device: Device, budget_bytes: int | None = None, times: MeasuredTimes | None = None
    ) -> Schedule:
        """The schedule of this policy; its peak is within `budget_bytes` if the policy plans for budgets.

        Raises InfeasibleBudget when such a policy cannot meet the budget.
        """
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"budget of {budget_bytes} bytes")
        return self._plan(graph, device, budget_bytes, op_seconds(graph, device, times))

    @abstractmethod
    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        """The schedule; `seconds[i]` is what op `i` takes."""


def may_move(tensor: Tensor) -> bool:
    """Whether it is possible and worth a transfer to take `tensor` off the device."""
    return tensor.movable and tensor.nbytes >= SMALLEST_MOVE_BYTES


def may_leave(program: Program, gap: Gap) -> bool:
    """Whether `gap` leaves room for a trip to the store: a movable tensor and at least one step in between.

    Forward and backward are two graphs, so a tensor that leaves in forward must be gone by its end, and one that is
    read in backward comes back no sooner than its start.
    """
    return not gap.remade and gap.end - gap.start > 1 and may_move(program.graph.tensors[gap.tensor])


def earliest_return(program: Program, gap: Gap) -> int:
    """The first step before which `gap`'s tensor may be prefetched: not in forward if it is needed in backward."""
    boundary = program.end_of_forward
    return max(gap.start + 1, boundary if gap.end >= boundary else 0)


def latest_release(program: Program, gap: Gap) -> int:
    """The last step before which `gap`'s tensor may be released: not after forward if it leaves in forward."""
    boundary = program.end_of_forward
    return min(gap.end, boundary) if gap.start < boundary else gap.end


def saved_gaps(program: Program) -> dict[int, Gap]:
    """For each movable saved tensor, the gap between its last use in forward and its first in backward."""
    boundary = program.end_of_forward
    return {g.tensor: g for g in program.gaps if g.start < boundary <= g.end and may_leave(program, g)}
