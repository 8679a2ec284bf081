"""The choice of a step's micro-batches: one after another, or all beside one another, layer by layer."""

from __future__ import annotations

from dataclasses import replace

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.micro_batches import before_the_last, own_inputs, side_by_side, why_one_by_one
from overspill.capture.compiled.whole_step import CapturedStep
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_seconds
from overspill.planning.overlap import computing_seconds
from overspill.plans.account import Account
from overspill.plans.fit import search
from overspill.plans.plan import Plan
from overspill.policies import policy_named
from overspill.policies.auto import Auto
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.options import Options

FASTER = 1.02
"""How many times as fast a step with all beside one another has to be, by simulation, for it to be taken."""
MOST_OPS = 20_000
"""Ops of the largest graph that is planned for it."""


class OneByOne(Exception):
    """Micro-batches run one after another; the message says why."""


def beside(
    captured: Captured, last: Plan, count: int, options: Options, account: Account, inputs: int | None = None
) -> tuple[Partitioned[CapturedStep], Plan]:
    """Return the step of all `count` micro-batches, and its plan, if that is faster than one after another.

    `captured` is the last of them, with the update, `last` its plan, and `inputs` the number of inputs that it has of
    its own, if known. The steps are compared by simulation, the micro-batches before the last with all optimizer state
    in the store. Raises OneByOne.
    """
    if not isinstance(captured, CapturedStep) or options.backend != "eager" or options.profile:
        raise OneByOne("the step is of Inductor's programs, is timed op by op, or has cuts")
    if policy_named(options.policy).name != Auto.name:
        raise OneByOne(f"policy {options.policy} plans each by itself")
    if why := why_one_by_one(captured):
        raise OneByOne(why)
    if inputs not in (None, len(own_inputs(captured))):
        raise OneByOne("an input shares its memory with a buffer")
    graph = captured.graph
    if count * len(graph.ops) > MOST_OPS:
        raise OneByOne(f"{count} of them have {count * len(graph.ops)} ops, which would take too long to plan")
    nbytes = last.asked_bytes
    before = search(before_the_last(graph), account, options.policy, nbytes, options.times).plan()
    one_by_one = (count - 1) * before.step_seconds + last.step_seconds
    computing = (count - 1) * _computing(before) + _computing(last)
    if one_by_one <= FASTER * computing:
        raise OneByOne(_no_faster(one_by_one, computing, "no order takes less than"))
    steps = Partitioned([side_by_side(captured, count)])
    try:
        plan = steps.planner(options, account)(nbytes)
    except InfeasibleBudgetError as error:
        raise OneByOne(f"all at once do not fit the budget: {error.cause}") from None
    if one_by_one <= FASTER * plan.step_seconds:
        raise OneByOne(_no_faster(one_by_one, plan.step_seconds, "all at once take"))
    usual = (count - 1) * before.in_core_seconds + last.in_core_seconds
    return steps, replace(
        plan,
        micro_batches=count,
        usual_seconds=usual,
        unmanaged_peak_bytes=last.unmanaged_peak_bytes,
        unmanaged_device_bytes=last.unmanaged_device_bytes,
    )


def _computing(plan: Plan) -> float:
    return sum(computing_seconds(plan.graph, plan.op_seconds))


def _no_faster(one_by_one: float, other: float, what: str) -> str:
    return f"one after another they take {format_seconds(one_by_one)}, {what} {format_seconds(other)} (simulated)"
