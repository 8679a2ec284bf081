"""The plan that a compiled step would have with Inductor's kernels, without compiling or running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.trace import describe_inputs
from overspill.capture.programs.unrun import Written, write
from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import Plan
from overspill.runtime.options import Options, budget_for, device_for, plan_graph
from overspill.runtime.surroundings import surroundings_of

from .inductor import Capture, compile_with_inductor
from .partitions import Partitioned

CPU = torch.device("cpu")
T = TypeVar("T")


def plan_unrun(step: nn.Module, batch: Sequence[Tensor], optimizer: Optimizer, options: Options) -> Plan:
    """The best plan of `step(*batch)`, its loss, over the partitions that a session would try; all tensors are fake.

    Library calls are taken to allocate nothing for themselves. Raises InfeasibleBudget, and as `write` does.
    """
    device = device_for(options, CPU)

    def plan(partitioned: Partitioned[Captured]) -> Plan:
        def within(nbytes: int) -> Plan:
            return partitioned.best_plan(lambda captured: plan_graph(options, captured.graph, device, nbytes))

        return within(budget_for(options, partitioned.graph, device, CPU, within))

    return of_unrun(step, batch, optimizer, options, plan)


def of_unrun(
    step: nn.Module,
    batch: Sequence[Tensor],
    optimizer: Optimizer,
    options: Options,
    use: Callable[[Partitioned[Captured]], T],
) -> T:
    """What `use` makes of the programs of `step(*batch)`; all tensors are fake. Raises what it raises, and as `write` does."""
    found: list[T | InfeasibleBudget] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        inputs = describe_inputs(module, examples)
        here = [e for e in examples if isinstance(e, nn.Parameter)]

        def plan(joint: JointGraph, capture: Capture) -> Any:
            around = surroundings_of(joint, here, step.parameters(), [optimizer], options.reserve)
            try:
                found.append(use(capture(joint, inputs, around)))
            except InfeasibleBudget as error:
                found.append(error)
            raise Written

        with torch._functorch.config.patch({"backward_pass_autocast": "off"}):
            return compile_with_inductor(module, examples, plan, nullcontext, options.partition)

    write(step, batch, backend)
    (made,) = found
    if isinstance(made, InfeasibleBudget):
        raise made
    return made
