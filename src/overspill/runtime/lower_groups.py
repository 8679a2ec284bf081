"""What a captured graph's instructions make, for a live pool that groups blocks by how long they stay."""

from __future__ import annotations

from overspill.capture.compiled.graph import Captured
from overspill.core import Mobility
from overspill.plans.plan import Plan

from .live.groups import NOTHING_TOLD, UNPLANNED, MadeBy, groups_of
from .live.steps import LiveSteps
from .live.two_ended_steps import TwoEndedSteps


def made_by(captured: Captured, plan: Plan, steps: LiveSteps | None) -> MadeBy:
    """What each instruction of `plan` makes, if the pool of `steps` wants to know it. What the caller gets stays beyond the step."""
    if not isinstance(steps, TwoEndedSteps):
        return NOTHING_TOLD
    # On CUDA libraries keep some of the scratch of their first calls for good.
    scratch = UNPLANNED if steps.allocator.device == "cuda" else Mobility.TEMPORARY
    return groups_of(plan, captured.handed_out(), scratch)
