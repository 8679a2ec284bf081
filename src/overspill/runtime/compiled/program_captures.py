"""Captures of a step as Inductor's programs, which are neither compiled nor run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Captured, InputInfo
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.programs.written_programs import nothing_compiled, traced
from overspill.core.errors import UnsupportedError
from overspill.job import Job
from overspill.runtime.options import Options
from overspill.runtime.surroundings import surroundings_of_job

from .inductor import ByPartition
from .loop_plans import LoopPlans, persistent
from .partitions import Partitioned
from .weak_references import WeakReferences

T = TypeVar("T")


def of_programs(
    step: nn.Module,
    batch: Sequence[Tensor],
    optimizer: Optimizer,
    options: Options,
    use: Callable[[Partitioned[Captured]], T],
    job: Job,
) -> T:
    """Return the result of `use` on the programs of `step(*batch)`; tensors are fake. Raises what `use` raises."""
    with nothing_compiled():
        module, examples, inputs = traced(step, batch)
        here = [e for e in examples if isinstance(e, nn.Parameter)]
        partitions = ByPartition(module, examples, options.partition)
        loop, parameters = LoopPlans(WeakReferences(step.parameters(), [optimizer]), options), persistent(examples)
        loop.name(step)
        joint = partitions.usual.joint
        if joint is None:
            raise UnsupportedError("torch.compile found nothing to compile in the step")
        around = surroundings_of_job(
            job, joint, here, parameters=step.parameters(), optimizer=optimizer, reserve=options.reserve
        )

        def captures(calls: JointGraph, inputs: list[InputInfo], *more: Any) -> Iterator[Captured]:
            return loop.captures(calls, inputs, parameters, *more)

        return use(partitions.capture(joint, inputs, around, captures))
