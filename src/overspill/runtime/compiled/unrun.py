"""Captures of a step as Inductor's programs, which are neither compiled nor run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.trace import describe_inputs
from overspill.capture.programs.unrun import Written, write
from overspill.core.errors import OverspillError
from overspill.job import Job
from overspill.runtime.options import Options
from overspill.runtime.surroundings import surroundings_of_job

from .inductor import Capture, compile_with_inductor
from .partitions import Partitioned

T = TypeVar("T")


def of_unrun(
    step: nn.Module,
    batch: Sequence[Tensor],
    optimizer: Optimizer,
    options: Options,
    use: Callable[[Partitioned[Captured]], T],
    job: Job,
) -> T:
    """The result of `use` on the programs of `step(*batch)`; tensors are fake. Raises what `use` and `write` raise."""
    found: list[T | OverspillError] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        inputs = describe_inputs(module, examples)
        here = [e for e in examples if isinstance(e, nn.Parameter)]

        def plan(joint: JointGraph, capture: Capture) -> Any:
            around = surroundings_of_job(
                job, joint, here, parameters=step.parameters(), optimizer=optimizer, reserve=options.reserve
            )
            try:
                found.append(use(capture(joint, inputs, around)))
            except OverspillError as error:
                found.append(error)
            raise Written

        return compile_with_inductor(module, examples, plan, lambda: None, options.partition)

    # Let Inductor write the programs; `plan` above ends the compilation with Written.
    write(step, batch, backend)
    (made,) = found
    if isinstance(made, OverspillError):
        raise made
    return made
