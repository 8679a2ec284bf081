"""A plan of a whole step with its updates gathered, so that one step of the optimizer serves several parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from overspill.capture.compiled.whole_step import MUTATION, UPDATE, CapturedStep
from overspill.planning.gather import gather
from overspill.plans.plan import Plan
from overspill.simulate import check, simulate

from .updates import OptimizerUpdates

Groups = tuple[tuple[int, ...], ...]


def gathered(
    captured: CapturedStep, plan: Plan, updates: OptimizerUpdates, measured: Callable[[Plan], Plan | None]
) -> tuple[Plan, Groups]:
    """`plan`, with no higher peak of live bytes, and the ops that are updates of one group each.

    `measured` says what else a plan takes, or None where it takes too much; then `plan` stays as it is.
    """
    found = [op for op, node in captured.nodes.items() if (of := node.meta.get(MUTATION)) and of.op == UPDATE]
    whole = [op for op in found if _is_whole(captured, op, updates)]
    schedule, groups = gather(plan.graph, plan.schedule, whole, plan.timeline.live_bytes)
    assert check(plan.graph, schedule).peak_bytes <= plan.peak_bytes
    timeline = simulate(plan.graph, schedule, plan.device, plan.op_seconds)
    made = measured(replace(plan, schedule=schedule, timeline=timeline))
    return (plan, ()) if made is None else (made, groups)


def _is_whole(captured: CapturedStep, op: int, updates: OptimizerUpdates) -> bool:
    node = captured.nodes[op]
    owner = getattr(node.target, "__self__", None)  # None where its gradient is laid out anew
    return owner is not None and updates.is_whole(node.args[0].meta["val"], owner.group)
