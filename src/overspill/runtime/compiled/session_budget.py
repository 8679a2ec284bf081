"""A session's budget in bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_apart
from overspill.plans.fit import fit
from overspill.plans.plan import Plan, smallest_budget
from overspill.runtime.options import Options

from .concurrent_plans import GraphProblem, HasGraph, Room, Settlement
from .pending_calls import Part
from .renewal import Renewal

_LOG = logging.getLogger("overspill")


class _Counted(NamedTuple):
    """A training graph that the budget is for."""

    part: Part
    ops: int
    """How many it has."""
    inputs: tuple[Any, ...]
    """Kinds of its inputs; empty where these do not matter."""


class SessionBudget:
    """Turns the requested budget into bytes.

    A relative budget holds for all graphs of the session. The smallest follows from the first step that trains, a share
    from the largest step so far: with a larger one, plans that move tensors are made again.
    """

    def __init__(self, options: Options, renewal: Renewal) -> None:
        self.limit = options.limit
        self._renewal = renewal
        self._fixed: int | None = None
        self._counted: set[_Counted] = set()
        self._bytes: dict[_Counted, int] = {}  # of each training graph, also from before its plan was forgotten
        self._settled = 0
        self._live = 0

    def forget(self) -> None:
        """Forget the fixed budget, before its steps are planned again; remember the bytes of each."""
        self._counted.clear()
        self._fixed = None

    def bytes_for(self, problem: GraphProblem[Any], room: Room, *, is_settled: bool, plans: Iterable[Plan]) -> int:
        """Return the budget in bytes for one graph: live bytes, or those of a GPU.

        `is_settled` means that calls of its kind have memory next to others. `plans` are those of the session so far.
        """
        kind, account = problem.kind, problem.account
        if not self.limit.is_relative:
            return account.fixed(self.limit)
        # A relative budget follows from training steps.
        captured = problem.captured(replace(room, keep_bytes=None), 0)
        graph = captured.graph
        counted = _Counted(kind.part, len(graph.ops), () if self.limit.smallest else kind.inputs)
        if counted not in self._counted and kind.inputs[0]:
            # Of several parts of the first step (several models, graph breaks), the one that needs the most counts.
            of_part = self._settled
            if not is_settled:
                of_part = account.bytes_of(self.limit, graph, lambda nbytes: _planned(problem, captured, nbytes))
            self._count(counted, of_part, plans)
        if self._fixed is None:
            # Evaluation before training: nothing is known of the step yet. It may have what it needs.
            known = max((plan.needed_bytes for plan in plans), default=0)
            return max(account.unmanaged(graph), known)
        return self._fixed

    def _count(self, counted: _Counted, nbytes: int, plans: Iterable[Plan]) -> None:
        """Fix the budget by a graph of `nbytes`, or raise it if the graph's part was planned for smaller inputs."""
        for other in [o for o in self._bytes if (o.part, o.inputs) == (counted.part, counted.inputs)]:
            if other not in self._counted:
                del self._bytes[other]  # what the same inputs took before the plan was forgotten
        self._bytes[counted] = nbytes
        of_part = [self._bytes[other] for other in self._bytes if other.part == counted.part]
        before, self._fixed = self._fixed or 0, max(self._fixed or 0, *of_part)
        is_larger = self._fixed > before and any(other.part == counted.part for other in self._counted)
        self._counted.add(counted)
        if is_larger and any(p.asked_bytes < self._fixed and p.is_managed for p in plans):
            self._renewal.is_asked = True
            self._renewal.begin_rounds()

    def grow(self, problem: GraphProblem[Any], room: Room, error: InfeasibleBudgetError) -> int:
        """Return the new smallest budget if a graph needs more than those before.

        Such a graph belongs to a further model, or to a larger batch.
        """
        needed = error.floor_bytes
        if not problem.account.is_card:
            captured = problem.captured(replace(room, keep_bytes=None), 0)
            needed = smallest_budget(lambda nbytes: _planned(problem, captured, nbytes))
        before, self._fixed = self._fixed or 0, needed
        _LOG.info("the smallest budget is %s now, not %s", *format_apart(needed, before))
        return needed

    def settle(self, settlement: Settlement, plans: Iterable[Plan]) -> int:
        """Return the live bytes for concurrent calls together.

        They follow from the present `plans`, or from those before them.
        """
        limit = self.limit
        if not limit.is_relative:
            self._live = max((plan.budget_bytes for plan in plans), default=self._live)
            return self._live
        live, counted = settlement.unmanaged()
        more = counted - live  # that a card has besides live bytes
        self._settled = limit.bytes_of(lambda: counted, 0, lambda: settlement.smallest()[0] + more)
        return self._settled - more


def _planned(problem: GraphProblem[Any], captured: HasGraph, budget_bytes: int) -> Plan:
    """Return the plan of one graph within a budget. Raises InfeasibleBudgetError."""
    return fit(lambda live: problem.plan(problem, captured, live), problem.account.of_card, budget_bytes)
