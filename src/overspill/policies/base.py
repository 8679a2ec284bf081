"""What a policy is: a function from a graph, a device and a budget to a Schedule, with a name and declared capabilities."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import ClassVar

from overspill.core import Device, Graph, Schedule
from overspill.core.errors import OverspillError, PolicyError, is_out_of_memory
from overspill.costs import MeasuredTimes, op_seconds
from overspill.planning.algorithms import folded, folded_seconds, memory_optimal, unfolded
from overspill.planning.floor import infeasible
from overspill.planning.step_program import StepProgram

MEMORY_OPTIMAL = ":m"
"""Behind a policy's name: with memory-optimal algorithms."""


class Policy(ABC):
    """One way to keep a step in memory. Subclasses decide in `_plan`; every schedule passes `simulate.check` before use."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """What it does, in a few words, for lists."""
    source: ClassVar[str] = ""
    """Where it comes from."""
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

        Raises InfeasibleBudget when such a policy cannot meet the budget, and PolicyError when one of another package fails.
        """
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"budget of {budget_bytes} bytes")
        if (
            self.plans_for_budget
            and budget_bytes is not None
            and not graph.ops
            and graph.persistent_bytes > budget_bytes
        ):
            raise infeasible(StepProgram(graph), budget_bytes, self.name)
        seconds = op_seconds(graph, device, times)
        with _without_collection(), self._failing_by_name():
            if not self.memory_optimal:
                return self._plan(graph, device, budget_bytes, seconds)
            choice = memory_optimal(graph)
            made = self._plan(folded(graph, choice), device, budget_bytes, folded_seconds(graph, choice, seconds))
        return replace(unfolded(made, choice), policy=f"{self.name}{MEMORY_OPTIMAL}")

    @contextmanager
    def _failing_by_name(self) -> Iterator[None]:
        """What a policy of another package raises inside is its own failure, and says so."""
        try:
            yield
        except Exception as error:
            ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
            if ours or isinstance(error, OverspillError) or is_out_of_memory(error):
                raise
            at = extract_tb(error.__traceback__)[-1]
            raise PolicyError(
                f"policy {self.name} raised {type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
            ) from error

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
