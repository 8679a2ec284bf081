"""A session's budget in bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_apart
from overspill.plans.plan import Plan, smallest_budget
from overspill.runtime.options import Options, budget_for, fixed_budget, is_of_card, unmanaged_bytes, within_budget

from .beside import GraphProblem, HasGraph, Room, Settlement
from .pending import Part

_LOG = logging.getLogger("overspill")


class SessionBudget:
    """Turns the requested budget into bytes.

    A relative budget is fixed by the first step that trains, and holds for all graphs of the session.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._fixed: int | None = None
        self._counted: set[Part] = set()  # the training graphs that it is for: a part, and how many ops
        self._settled = 0
        self._live = 0

    def forget(self) -> None:
        """Forget the fixed budget, before its steps are planned again."""
        self._counted.clear()
        self._fixed = None

    def bytes_for(self, problem: GraphProblem[Any], room: Room, *, is_settled: bool, plans: Iterable[Plan]) -> int:
        """The budget in bytes for one graph: live bytes, or a card's.

        `is_settled`: calls of its kind have their room alongside others. `plans` are those of the session so far.
        """
        where, kind = problem.joint.device, problem.kind
        if not self._options.limit.is_relative:
            return fixed_budget(self._options, problem.device, where)
        # A relative budget follows from the first training step.
        captured = problem.captured(replace(room, keep_bytes=None), 0)
        graph = captured.graph
        counted = (*kind.part, len(graph.ops))
        if counted not in self._counted and kind.inputs[0]:
            # Of several parts of the first step (several models, graph breaks), the one that needs the most counts.
            of_part = self._settled
            if not is_settled:
                device = problem.device
                of_part = budget_for(self._options, graph, device, where, lambda n: self._planned(problem, captured, n))
            self._fixed = max(self._fixed or 0, of_part)
            self._counted.add(counted)
        if self._fixed is None:
            # Evaluation before training: nothing is known of the step yet. It may have what it needs.
            known = max((plan.needed_bytes for plan in plans), default=0)
            return max(unmanaged_bytes(self._options, graph, problem.device), known)
        return self._fixed

    def grow(self, problem: GraphProblem[Any], room: Room, error: InfeasibleBudget) -> int:
        """The new smallest budget, where a graph needs more than those before.

        Such a graph is that of a further model, or of a larger batch.
        """
        needed = error.floor_bytes
        if not is_of_card(self._options, problem.device):
            captured = problem.captured(replace(room, keep_bytes=None), 0)
            needed = smallest_budget(lambda n: self._planned(problem, captured, n))
        before, self._fixed = self._fixed or 0, needed
        _LOG.info("the smallest budget is %s now, not %s", *format_apart(needed, before))
        return needed

    def settle(self, settlement: Settlement, plans: Iterable[Plan]) -> int:
        """Live bytes for concurrent calls together.

        By the `plans` in force, or those before them.
        """
        limit = self._options.limit
        if not limit.is_relative:
            self._live = max((plan.budget_bytes for plan in plans), default=self._live)
            return self._live
        live, counted = settlement.unmanaged()
        more = counted - live  # that a card has besides live bytes
        self._settled = limit.bytes_of(lambda: counted, 0, lambda: settlement.smallest()[0] + more)
        return self._settled - more

    def _planned(self, problem: GraphProblem[Any], captured: HasGraph, budget_bytes: int) -> Plan:
        """The plan of one graph within a budget. Raises InfeasibleBudget."""

        def make(live: int) -> tuple[None, Plan]:
            return None, problem.plan(self._options, captured, problem.device, live)

        return within_budget(self._options, problem.device, budget_bytes, make)[1]
