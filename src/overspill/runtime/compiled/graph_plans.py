"""The plans of a session's graphs, all within one budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes
from overspill.plans.fit import NEAR, fit
from overspill.plans.plan import Plan
from overspill.runtime.infeasible import infeasible_for
from overspill.runtime.options import Options

from .concurrent_calls import ConcurrentCalls
from .concurrent_plans import ALONE, C, GraphProblem, Room, Settlement
from .loop_plans import LoopPlans
from .pending_calls import GraphFrame, GraphKey
from .planned import Planned
from .renewal import Renewal
from .session_budget import SessionBudget

TOGETHER = "keeps what several models need for backward at once"


class GraphPlans:
    """Plans each graph next to the others of the session: those of concurrent calls and those of its own model.

    `planned` has the current plans in the order they were made. `accumulates` is set if gradients of the step before
    exist.
    """

    def __init__(
        self, options: Options, renewal: Renewal, loop: LoopPlans, aside: Callable[[], tuple[int, int]]
    ) -> None:
        self.planned: list[Planned] = []
        self.accumulates = False
        self.budget = SessionBudget(options, renewal)
        self.calls = ConcurrentCalls()
        self._renewal = renewal
        self._options = options
        self._loop = loop
        self._aside = aside

    @property
    def plans(self) -> list[Plan]:
        """The current plans."""
        return [planned.plan for planned in self.planned]

    def forget(self) -> None:
        """Drop all plans, before the models are compiled again."""
        self.planned.clear()
        self.budget.forget()
        self._renewal.is_asked = False

    def ask(self, options: Options) -> None:
        """Plan by other options from now on."""
        self._options = options
        self.budget.limit = options.limit

    def settle(self) -> bool:
        """Settle how many bytes concurrent calls leave to one another; return whether any changed.

        Raises InfeasibleBudgetError if they do not fit together.
        """
        return self.calls.settle(self._live_bytes, self._aside(), accumulates=self.accumulates)

    def _live_bytes(self, settlement: Settlement) -> int:
        return self.budget.settle(settlement, self.plans)

    def renew(self) -> None:
        """Drop outdated plans, after the bytes that calls leave to one another are settled.

        Raises InfeasibleBudgetError if these do not settle within some rounds.
        """
        if self.settle():
            self._renewal.begin_rounds()  # new concurrency was seen, of which there is only so much
        if self._renewal.is_endless():
            worst = max(self.planned, key=self.calls.needed_bytes)
            budget, needed = worst.plan.budget_bytes, self.calls.needed_bytes(worst)
            raise InfeasibleBudgetError(
                f"infeasible: the models of this session do not fit beside one another in {format_bytes(budget)}: "
                f"they need {format_bytes(needed)}; raise the budget",
                budget_bytes=budget,
                floor_bytes=needed,
                cause="what several models keep for their backward at once",
            )
        self.forget()

    def kept_by_others(self, kind: GraphKey, frame: GraphFrame) -> int:
        """Return the bytes that others keep for backward when a call of `kind` runs.

        Others are other models, and other frames of this model.
        """
        of_frames = self._retained_by_others(kind, frame)
        if not kind.inputs[0]:  # one plan may run behind several calls of a frame, as in each layer
            of_frames = max(of_frames, self.calls.kept_beside(kind, by_same_model=True))
        return of_frames + self.calls.kept_beside(kind, by_same_model=False)

    def make(self, problem: GraphProblem[C], inputs: Sequence[Any]) -> tuple[C, Planned]:
        """Return the captured graph and its plan.

        Raises InfeasibleBudgetError, which names the shapes of `inputs`.
        """
        kind, frame = problem.kind, problem.frame
        beside = self.calls.beside(kind)
        room = self.calls.room(kind, self.kept_by_others(kind, frame))
        if frame.broken:
            problem = problem.as_one_of_several()
        budget = self.budget.bytes_for(problem, room, is_settled=kind in self.calls, plans=self.plans)
        what = "training" if problem.trains else "evaluation"
        with infeasible_for(what, inputs, stays=lambda: self._loop.why_not):
            captured, plan, room = self._made(problem, room, budget)
        retained, reserved = plan.retained_bytes - room.pending_bytes, problem.surroundings.reserved_bytes
        return captured, Planned(frame, kind, plan, retained, room, beside=beside, reserved_bytes=reserved)

    def keep(self, planned: Planned, problem: GraphProblem[Any], here: Sequence[Tensor], known: set[int]) -> None:
        """Add the plan of a graph that reads the parameters `here` to those in use.

        `known` are the ids of the parameters that all plans count. Raises InfeasibleBudgetError if the gradients of a
        later graph do not fit next to an earlier backward.
        """
        planned.parameters = tuple(id(p) for p in here)
        self.planned.append(planned)
        self._check_whole(planned, here, known)
        if problem.trains:
            self.calls.plan(planned, problem)
            # An evaluation before training may have taken more than what is now the budget.
            self._renewal.is_asked |= any(p.plan.peak_bytes > planned.plan.asked_bytes for p in self.planned)

    def _made(self, problem: GraphProblem[C], room: Room, budget: int) -> tuple[C, Plan, Room]:
        """Return a captured graph, its plan, and its Room for concurrent calls.

        Room and budget may differ from those given, if these are too small. Raises InfeasibleBudgetError.
        """
        kind, trains = problem.kind, problem.trains
        try:
            return *self._within(problem, room if trains else ALONE, budget), room
        except InfeasibleBudgetError as error:
            retained = self._retained_by_others(kind, problem.frame)
            if self._options.limit.smallest:
                budget = self.budget.grow(problem, room if trains else ALONE, error)
            elif trains and kind in self.calls:
                room = self.calls.settle_again(problem, self._live_bytes, accumulates=self.accumulates)
                self._renewal.is_asked = True  # the other plans are for the rooms before
            elif trains and (beside := self.calls.beside(kind)):
                # The others were planned as if they were alone. From the next step on they leave room to one another.
                room = Room(pending_bytes=retained)
                self.calls.pending.learn(kind, beside)
                self._renewal.ask(TOGETHER)
            elif trains and retained:
                raise error.with_floor(self._enough(problem, error.floor_bytes)) from None
            else:
                raise
        return *self._within(problem, room if trains else ALONE, budget), room

    def _enough(self, problem: GraphProblem[Any], budget: int) -> int:
        """Return a budget in bytes that also fits the bytes that earlier frames of the model keep."""
        before = {p.frame.id: self.calls.problems[p.kind] for p in self.planned if self._is_before(p, problem.kind)}
        while True:
            pending = 0
            try:
                for each in (*before.values(), problem):
                    pending = self._within(each, Room(pending_bytes=pending), budget)[1].retained_bytes
            except InfeasibleBudgetError as error:
                budget = max(error.floor_bytes, budget + 1)
            else:
                return budget

    def _within(self, problem: GraphProblem[C], room: Room, budget: int) -> tuple[C, Plan]:
        """Capture and plan within `budget` bytes; on CUDA these are those of the GPU. Raises InfeasibleBudgetError."""
        if room != ALONE:
            problem = problem.as_one_of_several()
        if not problem.account.has_arena:
            return self._fitted(problem, room, budget)
        # Parameters do not move through an arena: first with all of them on the device, then without an arena.
        in_force = self._loop.is_in_force or self._loop.updates_on_host
        if not in_force:
            try:
                with self._loop.staying():
                    return self._fitted(problem, room, budget)
            except InfeasibleBudgetError as error:
                if not self._loop.may_move:
                    raise
                refusal = error.with_traceback(None)
        try:
            return self._fitted(problem.as_one_of_several(), room, budget)
        except InfeasibleBudgetError as error:
            if in_force or error.floor_bytes < refusal.floor_bytes:
                raise
            raise refusal from None

    def _fitted(self, problem: GraphProblem[C], room: Room, budget: int) -> tuple[C, Plan]:
        """Capture and plan within `budget` bytes by the problem's account. Raises InfeasibleBudgetError."""
        captured: dict[int, C] = {}

        def made(live: int) -> Plan:
            found, plan = problem.planned(room, live)
            captured[id(plan.graph)] = found
            return plan

        plan = fit(made, problem.account.of_card, budget)
        return captured[id(plan.graph)], plan

    def _retained_by_others(self, kind: GraphKey, frame: GraphFrame) -> int:
        """Return the bytes that the model's other frames keep between forward and backward.

        For each frame, the most of any plan counts.
        """
        found: dict[int, int] = {}
        for planned in self.planned:
            if planned.frame.id != frame.id and self._is_before(planned, kind):
                found[planned.frame.id] = max(found.get(planned.frame.id, 0), planned.retained_bytes)
        return sum(found.values())

    def _is_before(self, planned: Planned, kind: GraphKey) -> bool:
        """Return whether the plan is of the model of `kind`, and may keep tensors for backward."""
        return planned.part[0] == kind.part[0] and planned.kind in self.calls.problems

    def see(self, planned: Planned, args: Sequence[Any], call: weakref.ref[Node] | None) -> None:
        """Note the other calls that are pending when a planned graph runs.

        Plans that no longer fit become outdated.
        """
        beside = self.calls.see(planned, args, call)
        if beside is None:
            return
        together = [planned, *(p for p in self.planned if p.kind in beside)]
        if any(self.calls.needed_bytes(p) > p.plan.budget_bytes for p in together):
            several = len({kind.part[0] for kind in planned.beside} | {planned.part[0]}) > 1
            calls = f"calls a model {planned.beside.total() + 1} times before their backwards"
            self._renewal.ask(TOGETHER if several else calls)
        elif any(self._may_have_more(p) for p in together):
            self._renewal.is_asked = True  # what is behind the graph break is known now, and may leave it more
            self._renewal.begin_rounds()

    def _may_have_more(self, planned: Planned) -> bool:
        """Return whether a plan was made for the least, as calls behind its graph break were unknown, and is slow."""
        trains, is_settled = planned.kind in self.calls.problems, planned.room.is_settled
        return planned.frame.broken and trains and not is_settled and planned.plan.slowdown > NEAR

    def _check_whole(self, latest: Planned, here: Sequence[Tensor], known: set[int]) -> None:
        budget = latest.plan.asked_bytes
        for planned in self.planned:
            # Twice: parameter and gradient.
            new = sum(2 * p.nbytes for p in here if id(p) not in known.union(planned.parameters))
            if new and planned.frame.id != latest.frame.id and planned.least_peak_bytes + new > budget:
                raise InfeasibleBudgetError(
                    f"infeasible: the model has several graphs, and {format_bytes(new)} of parameters and gradients "
                    "of a later one do not fit beside the first one's peak of "
                    f"{format_bytes(planned.least_peak_bytes)} in "
                    f"{format_bytes(budget)}; use overspill.compile(model, ...), which sees all parameters at once",
                    budget_bytes=budget,
                    floor_bytes=planned.least_peak_bytes + new,
                    cause="parameters and gradients of a later graph",
                )
