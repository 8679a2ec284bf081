"""The choice of a step's micro-batches: one after another, or all beside one another, layer by layer."""

from __future__ import annotations

from dataclasses import replace

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.micro_batches import (
    before_the_last,
    graph_side_by_side,
    own_inputs,
    side_by_side,
    why_one_by_one,
)
from overspill.capture.compiled.whole_step import CapturedStep
from overspill.core import Graph
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.units import format_seconds
from overspill.planning.overlap import computing_seconds
from overspill.plans.account import Account
from overspill.plans.fit import Fit, search
from overspill.plans.plan import Plan
from overspill.policies import policy_named
from overspill.policies.auto import Auto
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.options import Options

FASTER = 1.02
"""How many times as fast a step with all beside one another has to be, by simulation, for it to be taken."""
MOST_OPS = 20_000
"""Ops of the largest graph that is planned for it; with more, a step runs in rounds of fewer micro-batches."""


class OneByOne(Exception):
    """Micro-batches run one after another; the message says why."""


def beside(
    captured: Captured, last: Plan, count: int, options: Options, account: Account, inputs: int | None = None
) -> Plan:
    """Return the plan of all `count` micro-batches, if that is faster than one after another.

    Or that of the last round, if all are too many. `captured` is the last micro-batch, with the update, `last` its
    plan, and `inputs` the number of inputs that it has of its own, if known. The ways are compared by simulation, with
    plans that need not be placed, and all optimizer state in the store, for what comes before the last. Raises
    OneByOne.
    """
    if not isinstance(captured, CapturedStep) or options.backend != "eager" or options.profile:
        raise OneByOne("the step is of Inductor's programs, is timed op by op, or has cuts")
    if why := _why_not(captured, count, options, inputs):
        raise OneByOne(why)

    def search_in(graph: Graph) -> Fit:
        return search(graph, account, options.policy, last.asked_bytes, options.times)

    before = search_in(before_the_last(captured.graph)).hoped
    if before is None:
        raise OneByOne("the micro-batches before the last have no plan by themselves")
    one_by_one = (count - 1) * before.step_seconds + last.step_seconds

    def check_faster(other: float, what: str) -> None:
        if one_by_one <= FASTER * other:
            took = format_seconds(one_by_one)
            raise OneByOne(f"one after another they take {took}, {what} {format_seconds(other)} (simulated)")

    at_once = "layer by layer"
    check_faster((count - 1) * _computing(before) + _computing(last), "no order takes less than")
    # A quick plan of all shows whether a thorough one is worth it.
    size = _round(count, len(captured.graph.ops))
    graph = graph_side_by_side(captured.graph, size, sums_stay=size < count)
    earlier = search_in(before_the_last(graph)).hoped if size < count else None
    rounds_before = 0.0 if earlier is None else (count // size - 1) * earlier.step_seconds
    found = search_in(graph)
    check_faster(rounds_before + (0.0 if found.hoped is None else found.hoped.step_seconds), at_once)
    try:
        plan = found.plan()
        plan.check_host()
    except (InfeasibleBudgetError, RequestError) as error:
        raise OneByOne(f"all at once: {error}") from None
    check_faster(rounds_before + plan.step_seconds, at_once)
    return replace(
        plan,
        micro_batches=size,
        rounds=count // size,
        usual_seconds=(size - 1) * before.in_core_seconds + last.in_core_seconds,
        unmanaged_peak_bytes=last.unmanaged_peak_bytes,
        unmanaged_device_bytes=last.unmanaged_device_bytes,
    )


def step_of(captured: CapturedStep, plan: Plan) -> Partitioned[CapturedStep]:
    """Return the step that `plan`, which `beside` has made of the `captured` one, is of."""
    step = side_by_side(captured, plan.micro_batches, sums_stay=plan.rounds > 1)
    return Partitioned([replace(step, graph=plan.graph)])


def _why_not(captured: CapturedStep, count: int, options: Options, inputs: int | None) -> str:
    """Return what rules all at once out before a plan; empty if nothing does."""
    if policy_named(options.policy).name != Auto.name:
        return f"policy {options.policy} plans each by itself"
    if why := why_one_by_one(captured):
        return why
    if inputs not in (None, len(own_inputs(captured))):
        return "an input shares its memory with a buffer"
    ops = len(captured.graph.ops)
    return f"a round of two of {ops} ops would take too long to plan" if _round(count, ops) == 1 else ""


def _round(count: int, ops: int) -> int:
    """Return the most micro-batches of so many ops that run at once, in rounds of one size."""
    return max(size for size in range(1, count + 1) if count % size == 0 and (size == 1 or size * ops <= MOST_OPS))


def _computing(plan: Plan) -> float:
    return sum(computing_seconds(plan.graph, plan.op_seconds))
