"""Group hints for a live pool, from a captured graph and its plan."""

from __future__ import annotations

from overspill.capture.compiled.graph import Captured
from overspill.core import Mobility
from overspill.plans.plan import Plan

from .live.groups import NOTHING_TOLD, UNPLANNED, MadeBy, groups_of
from .live.steps import LiveSteps
from .live.two_ended_steps import TwoEndedSteps


def made_by(captured: Captured, plan: Plan, steps: LiveSteps | None) -> MadeBy:
    """The group hints of `plan`, if the pool of `steps` uses them.

    The caller's results outlive the step.
    """
    if not isinstance(steps, TwoEndedSteps):
        return NOTHING_TOLD
    # On CUDA libraries keep some of the scratch of their first calls for good.
    scratch = UNPLANNED if steps.allocator.device == "cuda" else Mobility.TEMPORARY
    return groups_of(plan, captured.handed_out(), scratch)
