"""Plans for Inductor's kernels without compiling or running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.trace import describe_inputs
from overspill.capture.programs.unrun import Written, write
from overspill.core import Graph
from overspill.core.errors import InfeasibleBudget
from overspill.job import Job
from overspill.plans.plan import Plan
from overspill.runtime.hardware import account_of, device_named, elsewhere
from overspill.runtime.options import Options
from overspill.runtime.surroundings import surroundings_of_job

from .inductor import Capture, compile_with_inductor
from .partitions import Partitioned

CPU = torch.device("cpu")
T = TypeVar("T")


def plan_unrun(step: nn.Module, batch: Sequence[Tensor], optimizer: Optimizer, options: Options, job: Job) -> Plan:
    """The best plan of `step(*batch)`, its loss, over all partitions; tensors are fake.

    The partitions are those that a session would try. Library calls are assumed to allocate no workspace. Raises
    InfeasibleBudget, and what `write` raises.
    """
    account = account_of(options, elsewhere(device_named(options.device, CPU), options.software), CPU)

    def plan(partitioned: Partitioned[Captured]) -> Plan:
        return partitioned.planned(options, account)

    return of_unrun(step, batch, optimizer, options, plan, job)


def graph_unrun(step: nn.Module, batch: Sequence[Tensor], optimizer: Optimizer, options: Options, job: Job) -> Graph:
    """The Graph of `step(*batch)` by stock torch.compile's partition.

    Or by the partition that `options` name.
    """
    return of_unrun(step, batch, optimizer, options, lambda partitioned: partitioned.graph, job)


def of_unrun(
    step: nn.Module,
    batch: Sequence[Tensor],
    optimizer: Optimizer,
    options: Options,
    use: Callable[[Partitioned[Captured]], T],
    job: Job,
) -> T:
    """The result of `use` on the programs of `step(*batch)`; tensors are fake. Raises what `use` and `write` raise."""
    found: list[T | InfeasibleBudget] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        inputs = describe_inputs(module, examples)
        here = [e for e in examples if isinstance(e, nn.Parameter)]

        def plan(joint: JointGraph, capture: Capture) -> Any:
            around = surroundings_of_job(
                job, joint, here, parameters=step.parameters(), optimizer=optimizer, reserve=options.reserve
            )
            try:
                found.append(use(capture(joint, inputs, around)))
            except InfeasibleBudget as error:
                found.append(error)
            raise Written

        return compile_with_inductor(module, examples, plan, lambda: None, options.partition)

    # Let Inductor write the programs; `plan` above ends the compilation with Written.
    write(step, batch, backend)
    (made,) = found
    if isinstance(made, InfeasibleBudget):
        raise made
    return made
