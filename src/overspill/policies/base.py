"""What a policy is: a function from a graph, a device and a budget to a Schedule, with a name and declared capabilities."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from overspill.core import Device, Graph, Schedule, Tensor
from overspill.costs import MeasuredTimes, op_seconds

from .algorithms import folded, folded_seconds, memory_optimal, unfolded
from .program import Gap, Program

MEMORY_OPTIMAL = ":m"
"""Behind a policy's name: with memory-optimal algorithms."""
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
    unlimited: ClassVar[bool] = False
    """Whether the policy stands for a device with all the memory that it wants: no budget is too small for it."""

    def __init__(self, *, memory_optimal: bool = False) -> None:
        """`memory_optimal`: every op takes its algorithm of least workspace, the papers' "(m)", not its fastest, "(p)"."""
        self.memory_optimal = memory_optimal

    def plan(
        self, graph: Graph, device: Device, budget_bytes: int | None = None, times: MeasuredTimes | None = None
    ) -> Schedule:
        """The schedule of this policy; its peak is within `budget_bytes` if the policy plans for budgets.

        Raises InfeasibleBudget when such a policy cannot meet the budget.
        """
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"budget of {budget_bytes} bytes")
        seconds = op_seconds(graph, device, times)
        with _without_collection():
            if not self.memory_optimal:
                return self._plan(graph, device, budget_bytes, seconds)
            choice = memory_optimal(graph)
            made = self._plan(folded(graph, choice), device, budget_bytes, folded_seconds(graph, choice, seconds))
        return replace(unfolded(made, choice), policy=f"{self.name}{MEMORY_OPTIMAL}")

    @abstractmethod
    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        """The schedule; `seconds[i]` is what op `i` takes with its fastest algorithm."""


@contextmanager
def _without_collection() -> Iterator[None]:
    """No passes of the garbage collector: plans make many small objects and hardly a cycle, and a third of the time is its."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def may_move(tensor: Tensor) -> bool:
    """Whether it is possible and worth a transfer to take `tensor` off the device."""
    return tensor.movable and tensor.nbytes >= SMALLEST_MOVE_BYTES


def may_leave(program: Program, gap: Gap) -> bool:
    """Whether `gap` leaves room for a trip to the store: a movable tensor and at least one step in between.

    Where forward and backward are two graphs, a tensor that leaves in forward must be gone by its end, and one that is
    read in backward comes back no sooner than its start.
    """
    away = gap.end - gap.start + (program.length if gap.wraps else 0)
    return not gap.remade and away > 1 and may_move(program.graph.tensors[gap.tensor])


def possible_trips(program: Program) -> list[Gap]:
    """All gaps that leave room for a trip to the store."""
    return [gap for gap in program.gaps if may_leave(program, gap)]


def earliest_return(program: Program, gap: Gap) -> int:
    """The first step before which `gap`'s tensor may be prefetched: not in a forward graph if backward's needs it."""
    boundary = program.end_of_forward
    if gap.wraps:
        return 0
    if program.graph.whole_step:
        return gap.start + 1
    return max(gap.start + 1, boundary if gap.end >= boundary else 0)


def latest_release(program: Program, gap: Gap) -> int:
    """The last step before which `gap`'s tensor may be released: not after a forward graph that it leaves in."""
    boundary = program.end_of_forward
    if gap.wraps:
        return program.length
    if program.graph.whole_step:
        return gap.end
    return min(gap.end, boundary) if gap.start < boundary else gap.end


def saved_gaps(program: Program) -> dict[int, Gap]:
    """For each movable saved tensor, the gap between its last use in forward and its first in backward."""
    boundary = program.end_of_forward
    return {
        g.tensor: g
        for g in possible_trips(program)
        if g.start < boundary <= g.end and not program.graph.tensors[g.tensor].persistent
    }
