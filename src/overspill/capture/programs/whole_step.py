"""Capture a training step with its update around Inductor's programs: whole, or cut where the user's code runs.

`capture/compiled/{whole_step,cut_step}.py` do so with the ops of a joint graph, this module with calls of programs. It
makes a graph with these calls as nodes, and the programs' own fake tensors as values. Parameter updates, schedule and
execution are then the same as for every other step.
"""

from __future__ import annotations

from collections.abc import Sequence

from overspill.capture.compiled.checks import Check
from overspill.capture.compiled.cut_step import CapturedCutStep, CaptureOfCutStep
from overspill.capture.compiled.graph import InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.whole_step import CapturedStep, CaptureOfWholeStep, GradientOps, around_step
from overspill.core import TensorKind

from .graph import CallsOfPrograms
from .joint import joint_of_step
from .storages import Storages


def capture_step_of_programs(
    programs: Storages,
    traced: JointGraph,
    inputs: Sequence[InputInfo],
    ops: GradientOps,
    share: int = 1,
    checks: Sequence[Check] = (),
    outside_graph: tuple[tuple[TensorKind, int], ...] = (),
) -> CapturedStep:
    """Return the Graph of one training step around `programs`, made by Inductor from `traced`.

    The loss is divided by `share` after the programs, as in a loop over as many micro-batches. `checks` check the last
    results. Otherwise as `TracedStep.captured`. Raises UnsupportedError.
    """
    joint = joint_of_step(programs, traced, share, checks)
    around = around_step([node.meta["val"] for node in traced.primals], outside_graph)
    capture = _CaptureOfStep(joint, list(inputs), ops, around)
    capture.take(programs, traced)
    return capture.build()


def capture_cut_step_of_programs(
    programs: Storages,
    traced: JointGraph,
    joint: JointGraph,
    inputs: list[InputInfo],
    ops: GradientOps,
    surroundings: Surroundings,
) -> CapturedCutStep:
    """Return the Graph of a step around `programs`, which Inductor made from `traced`, cut where the user's code runs.

    `joint` has the calls of the programs as nodes, and is changed.
    """
    capture = _CaptureOfCutStep(joint, inputs, ops, surroundings)
    capture.take(programs, traced)
    return capture.build()


class _CaptureOfStep(CallsOfPrograms, CaptureOfWholeStep):
    """Builds the Graph of a whole step from calls of programs."""


class _CaptureOfCutStep(CallsOfPrograms, CaptureOfCutStep):
    """Builds the Graph of a step that is cut from calls of programs."""
