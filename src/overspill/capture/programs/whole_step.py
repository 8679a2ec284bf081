"""The whole step around Inductor's programs as one Graph: their calls are its forward and backward.

What `capture/compiled/whole_step.py` does with the ops of a joint graph is done here with calls of programs: a graph is
made whose nodes are these calls, and whose values are the programs' own fake tensors. The updates of parameters, the
schedule and what runs it are then those of every other step.
"""

from __future__ import annotations

from collections.abc import Sequence

from overspill.capture.compiled.graph import InputInfo
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
    name: str = "step",
    elsewhere: tuple[tuple[TensorKind, int], ...] = (),
) -> CapturedStep:
    """The Graph of one training step around `programs`, which Inductor made from the joint graph `traced`.

    The loss is divided by `share`, behind the programs, as a loop over as many micro-batches does it. The rest is as for
    `capture_step`. Raises UnsupportedError.
    """
    joint = joint_of_step(programs, traced, share)
    around = around_step([node.meta["val"] for node in traced.primals], elsewhere)
    capture = _CaptureOfStep(joint, list(inputs), ops, name, around)
    capture.take(programs, traced)
    return capture.build()


class _CaptureOfStep(CallsOfPrograms, CaptureOfWholeStep):
    """Calls of programs, and what a whole step does with gradients."""
