"""What a captured graph's instructions make, for a live pool that groups blocks by how long they stay."""

from __future__ import annotations

from torch import fx

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import storages
from overspill.capture.compiled.whole_step import CapturedStep
from overspill.capture.programs.graph import CapturedPrograms
from overspill.core import Mobility
from overspill.plans.plan import Plan

from .arena import leaving_keys
from .live.groups import NOTHING_TOLD, UNPLANNED, MadeBy, groups_of
from .live.steps import LiveSteps
from .live.two_ended_steps import TwoEndedSteps


def made_by(captured: Captured | CapturedPrograms, plan: Plan, steps: LiveSteps | None) -> MadeBy:
    """What each instruction of `plan` makes, if the pool of `steps` wants to know it. What the caller gets stays beyond the step."""
    if not isinstance(steps, TwoEndedSteps):
        return NOTHING_TOLD
    # On CUDA libraries keep some of the scratch of their first calls for good.
    scratch = UNPLANNED if steps.allocator.device == "cuda" else Mobility.TEMPORARY
    return groups_of(plan, _leaving(captured), scratch)


def _leaving(captured: Captured | CapturedPrograms) -> set[int]:
    """The tensors that are handed out: outputs and gradients, or of a whole step what it returns."""
    if isinstance(captured, CapturedPrograms):
        keys = leaving_keys(captured)
        return {tensor for tensor, key in captured.key_of.items() if key in keys}
    joint = captured.joint
    nodes = (
        (captured.loss, *captured.others)
        if isinstance(captured, CapturedStep)
        else (*joint.forward_outputs, *joint.backward_outputs)
    )
    found = (key for node in nodes if isinstance(node, fx.Node) for key in storages(node))
    return {captured.tensor_of[key] for key in found if key in captured.tensor_of}
