"""The search of `auto` for the best plan within a fixed effort; deterministic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overspill.core import Device, Schedule
from overspill.planning.assemble import assemble
from overspill.planning.effort import Effort
from overspill.planning.floor import algorithms_within
from overspill.planning.gaps import saved_gaps
from overspill.planning.overlap import cheaply_gathered, computing_seconds, overlapped
from overspill.planning.step_program import StepProgram
from overspill.policies.checkpoint import dropped_sets
from overspill.simulate import simulate

from . import _search
from .native import flags, native_graph, planner_of, schedule_of
from .remat_groups import RematGroups, by_op
from .starts import Start, Starts

GOOD_ENOUGH = 1.002
"""A plan within this factor of the ops' own time ends the search."""
PERTURBATION_RATE = 0.15
"""Changes of the penalties of swaps and slower algorithms, for each change of what is recomputed."""
TEMPERATURE = 0.001
"""The average cost of a change accepted at first, as a share of the ops' time; falls to 0."""
FAR = 1.2
"""An order in which the best plan of another takes more than so many times as long as there is not searched."""
SMALL = 0.001
"""Outputs of an op below this share of the budget are not changed on their own."""


@dataclass(frozen=True)
class BestPlan:
    """The best plan of a native search, with its program and budget."""

    made: _search.Attempt
    program: StepProgram
    budget_bytes: int

    def schedule(self, policy: str) -> Schedule:
        """Return the schedule of this plan."""
        made, before = self.made, self.program
        program = StepProgram(
            before.graph, made.recompute.tolist(), before.algorithms, made.drop_after_use.tolist(), made.kept.tolist()
        )
        return schedule_of(self.made.scheduler, self.made.plan, program, policy, self.budget_bytes)


class Search:
    """Searches the fastest step of `program` within a feasible budget.

    `seconds[i]` is the time of op `i` with its fastest algorithm.
    """

    def __init__(
        self, program: StepProgram, seconds: Sequence[float], device: Device, budget_bytes: int, effort: Effort
    ) -> None:
        self.graph, self.seconds, self.budget_bytes, self.effort = program.graph, seconds, budget_bytes, effort
        self.program = program.with_algorithms(algorithms_within(program, budget_bytes))
        saved = saved_gaps(program)
        self.droppable = sorted(filter(self.graph.may_recompute, saved), key=lambda t: (self.graph.producer[t], t))
        self.device = device
        # Parameters that are gathered again, if at all, and not fetched.
        self.gathered = cheaply_gathered(self.graph, device, seconds).intersection(self.droppable)
        self.annealing = self._annealing(self.gathered)

    def is_far(self, others: Sequence[BestPlan]) -> bool:
        """Return whether the best of `others`, plans in other orders, takes FAR longer in this one; it is a start."""
        if not others:
            return False
        near = min(others, key=lambda other: other.made.plan.seconds).made
        took = self.annealing.begin(flags(near.recompute, self.graph), flags(near.kept, self.graph))
        return took > FAR * near.plan.seconds

    def best(self) -> BestPlan:
        """Return the best plan found.

        A plan always exists, because the least memory without recomputation fits.
        """
        computing = sum(computing_seconds(self.graph, self.seconds))
        target = GOOD_ENOUGH * max(computing, self._with_all_memory())
        self._start(target)
        if self.annealing.best is None:  # all has to leave that can
            self.gathered = frozenset()
            self.annealing = self._annealing(self.gathered)
            self._start(target)
        self.annealing.anneal(
            attempts=self.effort.attempts_per_tensor * (1 + len(self.droppable)),
            evaluations=self.effort.evaluations,
            perturbation_rate=PERTURBATION_RATE,
            temperature_seconds=TEMPERATURE * computing,
            target_seconds=target,
        )
        best = self.annealing.best
        assert best is not None
        return BestPlan(best, self.program, self.budget_bytes)

    def _with_all_memory(self) -> float:
        """Return the seconds of a sharded step that gathers each group once; 0 if nothing is gathered."""
        if not self.gathered:
            return 0.0
        kept = assemble(StepProgram(self.graph), (), "", None)
        made = overlapped(self.graph, kept, self.device, self.seconds, None)
        return simulate(self.graph, made, self.device, self.seconds).step_seconds

    def _annealing(self, staying: Collection[int]) -> _search.Annealing:
        native = native_graph(self.graph, self.seconds, staying)
        planner = planner_of(native, self.program, self.device, self.budget_bytes)
        return _search.Annealing(planner, self._groups().native)

    def _start(self, target: float) -> None:
        """Try some starts, unless the first is good enough."""
        if self._begin(Start((), ())) > target:
            for dropped in dropped_sets(self.graph, self.seconds):
                self._begin(Start(dropped, ()))
            Starts(self.graph, self.seconds, by_op(self.graph, self.droppable)).best(self._begin)

    def _begin(self, start: Start) -> float:
        """Return the seconds of the plan of a start: as it is, or with all parameters gathered again."""
        kept = flags(start.kept, self.graph)
        sets = dict.fromkeys((frozenset(start.recompute), self.gathered.union(start.recompute)))
        return min(self.annealing.begin(flags(dropped, self.graph), kept) for dropped in sets)

    def _groups(self) -> RematGroups:
        """Return the saved outputs of each op as one group, without those too small to matter."""
        groups, least = by_op(self.graph, self.droppable), SMALL * self.budget_bytes
        large = [g for g in groups if sum(self.graph.tensors[t].nbytes for t in g) >= least]
        return RematGroups(self.graph, tuple(large or groups))
