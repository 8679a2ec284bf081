"""Gather updates so that one optimizer step serves several parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from overspill.capture.compiled.whole_step import MUTATION, UPDATE, CapturedStep
from overspill.planning.gather import gather
from overspill.plans.plan import Plan, tiers_of
from overspill.simulate import check

from .parameter_state import ParameterState

SHARES = (1.0, 0.85, 0.7)
"""Shares of the peak live bytes within which updates are gathered, tried in turn; less means less fragmentation."""


def gathered(captured: CapturedStep, plan: Plan, measured: Callable[[Plan], Plan]) -> Plan:
    """Return `plan` with updates grouped into one call each, at no higher peak.

    `measured` returns the plan with the other memory that it takes. If that exceeds the budget, fewer updates are
    gathered, or none.
    """
    found = [op for op, node in captured.nodes.items() if (of := node.meta.get(MUTATION)) and of.op == UPDATE]
    whole = [op for op in found if _is_whole(captured, op)]
    before = None
    for share in SHARES:
        # Gather less and less until the plan still fits.
        schedule, groups = gather(plan.graph, plan.schedule, whole, plan.timeline.live_bytes, share)
        if not groups:
            break
        if schedule == before:
            continue
        assert check(plan.graph, schedule).peak_bytes <= plan.peak_bytes
        before = schedule
        tiers, timeline = tiers_of(plan.graph, schedule, plan.device, plan.op_seconds)
        made = measured(replace(plan, schedule=schedule, timeline=timeline, groups=groups, tiers=tiers))
        if made.needed_bytes <= made.asked_bytes:
            return made
    return plan


def _is_whole(captured: CapturedStep, op: int) -> bool:
    node = captured.nodes[op]
    owner = getattr(node.target, "__self__", None)  # None where its gradient is laid out anew
    return isinstance(owner, ParameterState) and owner.updates.is_whole(node.args[0].meta["val"], owner.group)
