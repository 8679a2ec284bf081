"""Plans that tags of nodes can express: what forward saves, and what backward fetches or recomputes, once each.

A runtime that obeys tags does less than a schedule may ask for. A saved tensor stays until its last use. An offloaded
one leaves after its last use in forward, and is back at its first in backward. A recomputed one is made before the
first op of backward that needs it, and stays until its last use. So the peak of tags is that of a schedule of their
own, and a plan fits if this peak does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise

import numpy as np

from overspill.core import Graph, Phase, Schedule, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_apart
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.effort import at_effort
from overspill.planning.gaps import may_swap
from overspill.planning.step_program import StepProgram
from overspill.plans.account import Account
from overspill.plans.fit import least_of
from overspill.plans.plan import Plan
from overspill.simulate import check, simulate

LITTLE_EFFORT, EFFORT = 0.05, 0.2
"""Shares of the effort for a rung of the ladder, and for plans near the one that fits; more gains under 1 %."""
RUNGS, BETWEEN = 16, 3
"""Numbers of live bytes that are planned for without transfers, and then next to the fastest plan of these."""


class Tag(StrEnum):
    """What happens to a tensor of forward that backward needs."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class TaggedStep:
    """A step that runs by tags."""

    schedule: Schedule
    peak_bytes: int
    tags: dict[int, Tag]
    """The tag of each tensor that forward makes and backward needs, by tensor."""


def tagged(graph: Graph, schedule: Schedule, may_leave: Collection[int]) -> TaggedStep:
    """Return the step of `graph` by the tags that `schedule` comes down to, with its live peak bytes.

    Tensors that `schedule` moves to the host, and that are not among `may_leave`, are recomputed, or else saved.
    """
    crossing = _crossing(graph, schedule)
    dropped = {
        tensor
        for tensor, tag in crossing.items()
        if tag is Tag.RECOMPUTE or (tag is Tag.OFFLOAD and tensor not in may_leave and graph.may_recompute(tensor))
    }
    program = StepProgram(graph, dropped, kept=crossing.keys() - dropped)
    boundary = program.end_of_forward
    away = [
        Transfer(gap, gap.start + 1, gap.start + 1, gap.end, gap.end)
        for gap in program.gaps
        if crossing.get(gap.tensor) is Tag.OFFLOAD
        and gap.tensor in may_leave
        and gap.start < boundary <= gap.end
        and may_swap(program, gap)
    ]
    by_tags = assemble(program, away, schedule.policy, None)
    return TaggedStep(by_tags, check(graph, by_tags).peak_bytes, _crossing(graph, by_tags))


def _crossing(graph: Graph, schedule: Schedule) -> dict[int, Tag]:
    """Return how backward first gets each tensor of forward that it reads, by tensor; persistent ones are there."""
    source: dict[int, Tag] = {}  # of tensors on the device that forward has made
    found: dict[int, Tag] = {}
    runs = (i for i, one in enumerate(schedule.instructions) if one.verb is Verb.RUN)
    forward = [i for i in runs if graph.ops[schedule.instructions[i].target].phase is Phase.FORWARD]
    last = max(forward, default=-1)
    for index, (verb, target) in enumerate((one.verb, one.target) for one in schedule.instructions):
        if verb is Verb.FREE:
            source.pop(target, None)
        elif verb is Verb.PREFETCH and not graph.tensors[target].persistent:
            source[target] = Tag.OFFLOAD if index > last else Tag.SAVE
        elif verb is Verb.RUN and index <= last:
            source.update((t, Tag.SAVE) for t in graph.ops[target].writes if not graph.tensors[t].persistent)
        elif verb in (Verb.RUN, Verb.RECOMPUTE):
            op, again = graph.ops[target], verb is Verb.RECOMPUTE
            reads = op.recompute_reads if again else op.reads
            found.update((t, source[t]) for t in reads if t in source and t not in found)
            if again:
                source.update((t, Tag.RECOMPUTE) for t in op.recompute_writes if t not in source)
    return found


@dataclass(frozen=True)
class TagAccount(Account):
    """Count the live bytes of a step that runs by the tags of its plan."""

    may_leave: frozenset[int]
    """Tensors that tags may send to the host."""

    @property
    def placed_by(self) -> str:
        """The name of what a plan has to fit."""
        return "tags of nodes"

    @property
    def is_steady(self) -> bool:
        """Whether a plan of fewer live bytes also takes less by its tags: nearly always, if it may use transfers."""
        return True

    def placed(self, plan: Plan) -> Plan:
        """Return `plan` with the bytes that a step takes by its tags, and without transfers also with its time."""
        step = tagged(plan.graph, plan.schedule, self.may_leave)
        if not self.may_leave:
            timeline = simulate(plan.graph, step.schedule, plan.device, plan.op_seconds)
            plan = replace(plan, schedule=step.schedule, timeline=timeline, peak_bytes=step.peak_bytes)
        return replace(plan, reserved_bytes=step.peak_bytes)

    def refusal(self, budget_bytes: int, least: Plan, fewest: Plan, cause: str) -> InfeasibleBudgetError:
        """Return the error for a budget that no tags meet, with the least bytes that some take."""
        del fewest
        budget, taken = format_apart(budget_bytes, least.taken_bytes)
        return InfeasibleBudgetError(
            f"infeasible: budget {budget} is below {taken}, the least that this graph takes by tags ({cause})",
            budget_bytes=budget_bytes,
            floor_bytes=least.taken_bytes,
            cause=cause,
        )


def fastest_by_recomputing(account: TagAccount, make: Callable[[int], Plan], most_bytes: int) -> Callable[[int], Plan]:
    """Return a function from a budget to a fast plan without transfers, of plans on a ladder of live bytes.

    `make` plans for live bytes, of which `most_bytes` are enough for any plan. Fewer live bytes are not always fewer by
    tags: below some number a policy needs transfers. So the least that tags take is looked for on the whole ladder.
    """

    @cache
    def at(live_bytes: int, effort: float) -> Plan:
        with at_effort(effort):
            return account.placed(make(live_bytes))

    @cache
    def least_live() -> tuple[int, str]:
        live_bytes, _, cause = least_of(lambda live: at(live, LITTLE_EFFORT))
        return live_bytes, cause

    def within(budget_bytes: int) -> Plan:
        if budget_bytes >= most_bytes:
            return account.charged(at(most_bytes, LITTLE_EFFORT), budget_bytes)
        lowest, cause = least_live()
        rungs = [round(n) for n in np.geomspace(most_bytes, min(lowest, most_bytes), RUNGS)]
        for above, live_bytes in pairwise(rungs):
            if at(live_bytes, LITTLE_EFFORT).taken_bytes <= budget_bytes:
                # With all effort, and up to the rung above, which is too high.
                between = (round(n) for n in np.linspace(live_bytes, above, BETWEEN, endpoint=False))
                tried = [at(live_bytes, LITTLE_EFFORT), *(at(live, EFFORT) for live in between)]
                fitting = (plan for plan in tried if plan.taken_bytes <= budget_bytes)
                return account.charged(min(fitting, key=lambda plan: plan.step_seconds), budget_bytes)
        least = min((at(live, LITTLE_EFFORT) for live in rungs), key=lambda plan: plan.taken_bytes)
        raise account.refusal(budget_bytes, least, least, cause)

    return within
