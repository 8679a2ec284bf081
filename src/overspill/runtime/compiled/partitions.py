"""The best plan over several captures of one step.

With eager's kernels, the captures are the step as traced, and the same with its large row-wise chains in pieces of rows
(`capture/compiled/pieces.py`). With Inductor's kernels, which fuse such chains, they are of forward-backward
partitions. PyTorch's min-cut partitioner decides, before kernels exist, which tensors forward saves and backward
recomputes within its own kernels. It saves less for a smaller `activation_memory_budget`. So each partition has its own
programs, and its own plan.

It takes as long to make programs as to compile. So other captures than the usual one are made only if its plan is
slower than a step without Overspill, or it has none. They are made only as long as the next one is faster. The usual
programs with weights that move are made of those that are there, and end no search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Generic

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.graph import Captured
from overspill.core import Graph
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.progress import progress_under
from overspill.core.units import format_bytes
from overspill.costs import MeasuredTimes, op_seconds
from overspill.plans.account import Account
from overspill.plans.fit import NEAR, Fit
from overspill.plans.plan import Plan, plans_once
from overspill.policies.in_core import Liveness
from overspill.runtime.options import Options
from overspill.simulate import check, simulate

from .concurrent_plans import C

PARTITIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Values of `activation_memory_budget`; the first is PyTorch's own."""


class Partitioned(Generic[C]):
    """Captures of a step, the usual one first.

    The others are made at their first use.
    """

    def __init__(self, captured: Iterable[C]) -> None:
        self._rest = iter(captured)
        self._found = [next(self._rest)]

    def __iter__(self) -> Iterator[C]:
        position = 0
        while position < len(self._found):
            yield self._found[position]
            position += 1
            if position == len(self._found) and (another := next(self._rest, None)) is not None:
                self._found.append(another)

    @property
    def graph(self) -> Graph:
        """The usual graph, as PyTorch or stock torch.compile runs it.

        Budgets given as shares are shares of its peak.
        """
        return self._found[0].graph

    def _is_usual(self, captured: C) -> bool:
        """Return whether `captured` is of the usual programs, with weights that move."""
        usual = self._found[0]
        if not (isinstance(captured, CapturedCutStep) and isinstance(usual, Captured)):
            return False
        return captured.partition == usual.partition

    def _may_move(self, captured: C) -> bool:
        """Return whether weights stay in `captured`, and a capture of its programs with weights that move follows."""
        return not isinstance(captured, CapturedCutStep) and any(isinstance(c, CapturedCutStep) for c in self._found)

    def of(self, graph: Graph) -> C:
        """Return the capture that `graph` belongs to."""
        return next(captured for captured in self._found if captured.graph is graph)

    def planner(self, options: Options, account: Account) -> Callable[[int], Plan]:
        """Return a function from a budget in bytes of `account` to the best plan."""
        made = plans_once(account.device, options.policy, options.times)

        def within(nbytes: int) -> Plan:
            def search_in(captured: C) -> Fit:
                here = account.alone if isinstance(captured, CapturedCutStep) else account
                return Fit(partial(made, captured.graph), here, nbytes)

            return self.best_plan(search_in, options.times)

        return within

    def planned(self, options: Options, account: Account) -> Plan:
        """Return the best plan within the budget of `options`. Raises InfeasibleBudgetError."""
        planner = self.planner(options, account)
        return planner(account.bytes_of(options.limit, self.graph, planner))

    def best_plan(self, search_in: Callable[[C], Fit], times: MeasuredTimes | None = None) -> Plan:
        """Return the fastest plan of all captures, by simulation, with the unmanaged memory of the usual one.

        If the usual capture's plan is slow even at best, its search waits. It begins only if no other plan is as fast
        as that. A plan within NEAR of the unmanaged step ends the search. `times` are the measured times that the plans
        use. Raises InfeasibleBudgetError with the least floor if no capture has a plan.
        """
        best: Plan | None = None
        waiting: Fit | None = None
        hoped_seconds = math.inf  # of the plan that waits
        refusals = _Refusals()
        enough = 0.0
        for captured in self:
            found = search_in(captured)
            if captured is self._found[0]:
                hoped = found.hoped
                enough = 0.0 if hoped is None else NEAR * hoped.in_core_seconds
                if hoped is None or hoped.slowdown > NEAR:
                    waiting, hoped_seconds = found, math.inf if hoped is None else hoped.step_seconds
                    continue
            plan = refusals.plan_of(found)
            if plan is None:
                # It is not faster than a plan: if the one that waits is a plan, the search ends.
                ends = not (self._is_usual(captured) or self._may_move(captured))
                if ends and best is None and waiting is not None and hoped_seconds < math.inf:
                    best = refusals.plan_of(waiting)
                    waiting, hoped_seconds = None, math.inf
                if best is None or not ends:
                    continue
                break
            # Stop when a plan is good enough, or the next is not faster.
            before_seconds = hoped_seconds if best is None else best.step_seconds
            best = _fastest(best, plan)
            if best.step_seconds <= enough or (plan.step_seconds >= before_seconds and not self._is_usual(captured)):
                break
        if waiting is not None and (best is None or hoped_seconds < best.step_seconds):
            plan = refusals.plan_of(waiting)
            best = best if plan is None else _fastest(best, plan)
        if best is None:
            raise refusals.least()
        return best if best.graph is self.graph else _compared(self.graph, best, times)


def _fastest(best: Plan | None, found: Plan) -> Plan:
    return found if best is None or found.step_seconds < best.step_seconds else best


class _Refusals:
    """The refusals of searches without a plan; of those that cannot have one, the smallest plan is only made last."""

    def __init__(self) -> None:
        self._least: InfeasibleBudgetError | None = None
        self._hopeless: list[tuple[int, Fit]] = []

    def plan_of(self, found: Fit) -> Plan | None:
        """Return the plan, or None."""
        if (below := found.refused_below) is not None:
            self._hopeless.append((below, found))
            return None
        return self._worked_out(found)

    def least(self) -> InfeasibleBudgetError:
        """Return the refusal with the least floor. It is not kept: its traceback will keep the caller's frame."""
        hopeless = sorted(self._hopeless, key=itemgetter(0))
        known = [below for below, _ in hopeless] + ([] if self._least is None else [self._least.floor_bytes])
        # It is known long before a budget that works.
        with progress_under(f"no plan takes less than {format_bytes(min(known))}; looking for a budget that works"):
            for below, found in hopeless:
                if self._least is None or below < self._least.floor_bytes:
                    self._worked_out(found)
        least, self._least = self._least, None
        assert least is not None
        return least

    def _worked_out(self, found: Fit) -> Plan | None:
        try:
            return found.plan()
        except InfeasibleBudgetError as error:
            if self._least is None or error.floor_bytes < self._least.floor_bytes:
                self._least = error.with_traceback(None)
            return None


def _compared(usual: Graph, plan: Plan, times: MeasuredTimes | None) -> Plan:
    """Return `plan` with the figures of an unmanaged step of `usual`."""
    plain = Liveness().plan(usual, plan.device)
    seconds = simulate(usual, plain, plan.device, op_seconds(usual, plan.device, times)).step_seconds
    return replace(plan, unmanaged_peak_bytes=check(usual, plain).peak_bytes, usual_seconds=seconds)
