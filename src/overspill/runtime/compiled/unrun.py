"""The plan that a compiled step would have with Inductor's kernels, without compiling or running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.trace import describe_inputs
from overspill.capture.programs.graph import CapturedPrograms
from overspill.capture.programs.unrun import Written, write
from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import Plan
from overspill.runtime.options import Options, budget_for, device_for, plan_graph
from overspill.runtime.surroundings import surroundings_of

from .inductor import Capture, compile_with_inductor

CPU = torch.device("cpu")


def plan_unrun(step: nn.Module, batch: Sequence[Tensor], optimizer: Optimizer, options: Options) -> Plan:
    """The best plan of `step(*batch)`, its loss, over the partitions that a session would try; all tensors are fake.

    Library calls are taken to allocate nothing for themselves. Raises InfeasibleBudget, and as `write` does.
    """
    device = device_for(options, CPU)
    found: list[Plan | InfeasibleBudget] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        inputs = describe_inputs(module, examples)
        here = [e for e in examples if isinstance(e, nn.Parameter)]

        def plan(joint: JointGraph, capture: Capture) -> Any:
            around = surroundings_of(joint, here, step.parameters(), [optimizer], options.reserve)
            partitioned = capture(joint, inputs, around)

            def within(nbytes: int) -> Plan:
                def of(captured: CapturedPrograms) -> Plan:
                    return plan_graph(options, captured.graph, device, nbytes)

                return partitioned.best_plan(of)

            try:
                found.append(within(budget_for(options, partitioned.graph, device, CPU, within)))
            except InfeasibleBudget as error:
                found.append(error)
            raise Written

        with torch._functorch.config.patch({"backward_pass_autocast": "off"}):
            return compile_with_inductor(module, examples, plan, lambda: None, options.partition)

    write(step, batch, backend)
    (plan,) = found
    if isinstance(plan, InfeasibleBudget):
        raise plan
    return plan
