"""The interface of a policy, which plans a Schedule within a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, ClassVar

from overspill.core import Device, Graph, Schedule
from overspill.core.errors import OverspillError, PolicyError, is_out_of_memory
from overspill.core.garbage import without_collection
from overspill.costs import MeasuredTimes, op_seconds
from overspill.planning.algorithms import folded, folded_seconds, memory_optimal, unfolded
from overspill.planning.floor import infeasible
from overspill.planning.overlap import overlapped
from overspill.planning.step_program import StepProgram

from .parameters import Parameter, flag, spelled_parameters

MEMORY_OPTIMAL = flag("m", "memory_optimal", "every op takes its algorithm of least workspace, the papers' (m)")
"""A parameter of all policies."""
FEATURE_MAPS_ALONE = "moves feature maps alone here; with --whole-step all tensors, as in its paper"


class Policy(ABC):
    """Base of policies; subclasses plan in `_plan`, and every schedule has to pass `simulate.check`."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """One line on what it does, for lists."""
    source: ClassVar[str] = ""
    """Where it comes from: paper and section."""
    offloads: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    plans_for_budget: ClassVar[bool] = False
    """Whether the plan adapts to the budget; otherwise there is one schedule, which fits or does not."""
    in_pieces: ClassVar[bool] = False
    """Whether it takes a step with its large row-wise chains in pieces of rows, where that is faster."""
    unlimited: ClassVar[bool] = False
    """Whether the policy assumes unlimited memory: no budget is too small for it."""
    placement: ClassVar[str | None] = None
    """The allocator that it is made for, that of its paper; None: PyTorch's."""
    moves_all: ClassVar[bool] = False
    """Whether its paper moves parameters and optimizer state as all other tensors."""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    """Its own parameters, without those of all policies."""

    def __init__(self, *, memory_optimal: bool = False) -> None:
        """Set whether ops take their algorithm of least workspace ("(m)" in papers), or the fastest ("(p)")."""
        self.memory_optimal = memory_optimal

    @classmethod
    def every_parameter(cls) -> tuple[Parameter, ...]:
        """Return its parameters and those of all policies."""
        return (*cls.parameters, MEMORY_OPTIMAL)

    def spelled(self, **chosen: Any) -> str:
        """Return the name with all parameters that are set, or `chosen`, as `policy_named` reads it."""
        text = spelled_parameters(self.every_parameter(), vars(self) | chosen)
        return f"{self.name}:{text}" if text else self.name

    def __str__(self) -> str:
        """Return the name with its parameters."""
        return self.spelled()

    def note_on(self, graph: Graph) -> str | None:
        """Return a note that a user must know about its plans of `graph`, if any."""
        return FEATURE_MAPS_ALONE if self.moves_all and not graph.whole_step else None

    def plan(
        self, graph: Graph, device: Device, budget_bytes: int | None = None, times: MeasuredTimes | None = None
    ) -> Schedule:
        """Plan `graph` by this policy, within `budget_bytes` if it plans for budgets.

        Raises InfeasibleBudgetError if it cannot meet the budget, and PolicyError if a policy of another package fails.
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
        # Memory-optimal algorithms are fixed beforehand, so that policies need not know of them.
        # Collecting garbage would take a third of the planning time.
        with without_collection(), self._failing_by_name():
            if not self.memory_optimal:
                made = self._plan(graph, device, budget_bytes, seconds)
                return self._named(overlapped(graph, made, device, seconds, budget_bytes))
            choice = memory_optimal(graph)
            made = self._plan(folded(graph, choice), device, budget_bytes, folded_seconds(graph, choice, seconds))
        return self._named(unfolded(made, choice))

    def _named(self, made: Schedule) -> Schedule:
        """Return `made` under the name of this policy, with the parameters that it chose itself."""
        if isinstance(made, Schedule) and made.policy == self.name:
            return replace(made, policy=self.spelled())
        return made

    @contextmanager
    def _failing_by_name(self) -> Iterator[None]:
        """Turn unexpected errors of another package's policy into PolicyError, inside the block."""
        try:
            yield
        except Exception as error:
            ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
            if ours or isinstance(error, OverspillError) or is_out_of_memory(error):
                raise
            at = extract_tb(error.__traceback__)[-1]
            raise PolicyError(
                f"policy {self.name} raised {type(error).__name__}: {error} ({Path(at.filename).name}, line "
                f"{at.lineno})"
            ) from error

    @abstractmethod
    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        """Return the schedule; op `i` takes `seconds[i]` with its fastest algorithm."""
