"""The ways to train a job: plainly, as others save memory, and under Overspill's budgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from paired import plan_figures
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import overspill
from gpu.experiment import Figures
from overspill.models.gpt2 import TransformerBlock
from overspill.models.resnet import Residual
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan

from .jobs import Built
from .offload_hooks import HostOptimizer, OffloadHooks

Step = Callable[[], Tensor]


class Way:
    """A step to call as often as one likes, what the way to train says of itself afterwards, and what can be recorded of it."""

    def __init__(self, step: Step, says: Callable[[], Figures] = dict, source: Any = None) -> None:
        self.step = step
        self.says = says
        self.source = source


def loop(
    built: Built, call: Callable[..., Tensor], around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Way:
    """The plain training loop, with forward inside of `around()`."""
    optimizer = built.optimizer()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with around():
            loss = call(*built.batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Way(step)


def eager(built: Built) -> Way:
    """Plain PyTorch."""
    return loop(built, built.to_device())


def compiled(built: Built, partition: float = 1.0) -> Way:
    """torch.compile, with `activation_memory_budget` at `partition`."""
    torch._functorch.config.activation_memory_budget = partition
    return loop(built, torch.compile(built.to_device(), fullgraph=True, dynamic=False))


def checkpointed(built: Built) -> Way:
    """torch.utils.checkpoint around each block."""
    _checkpoint_blocks(built.to_device())
    return loop(built, built.step)


def saved_on_cpu(built: Built) -> Way:
    """torch.autograd.graph.save_on_cpu(pin_memory=True) around forward."""
    return loop(built, built.to_device(), lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def offload_hooks(built: Built, *, with_checkpoints: bool = False) -> Way:
    """Saved tensors offloaded on a side stream, all of them or what the blocks' checkpoints save."""
    step = built.to_device()
    if with_checkpoints:
        _checkpoint_blocks(step)
    hooks = OffloadHooks(step.parameters())
    return loop(built, step, lambda: hooks)


def host_optimizer(built: Built) -> Way:
    """Gradients and optimizer state on the host, which steps there."""
    step = built.to_device()
    optimizer = HostOptimizer(step.parameters(), built.make_optimizer)

    def one_step() -> Tensor:
        loss = step(*built.batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Way(one_step)


def managed(built: Built, budget: str | int | None, backend: str = "eager", placement: str | None = None) -> Way:
    """overspill.compile within `budget`."""
    model = overspill.compile(built.step, budget=_asked(budget), backend=backend, placement=placement, fullgraph=True)
    built.to_device()  # behind it, for planned addresses must be in force before there is a CUDA tensor
    way = loop(built, model)
    session = model.overspill

    def says() -> Figures:
        moved = session.engine.offloaded_bytes if session.engine else 0
        found = promises(session.plans[0]) | {"offloaded_bytes_in_all": moved}
        partitions = [p for p in session.partitions if p is not None]
        return found | ({"partition": partitions[0]} if partitions else {})

    way.says, way.source = says, session
    return way


def whole_step(built: Built, budget: str | int | None, backend: str = "eager") -> Way:
    """overspill.train_step within `budget`."""
    built.to_device()
    whole = overspill.train_step(
        built.step.model, built.step.loss, built.optimizer(), budget=_asked(budget), backend=backend
    )
    return Way(lambda: whole(*built.batch), lambda: promises(whole.plans[-1]) | {"peak_bytes": whole.peak_bytes}, whole)


def promises(plan: Plan) -> Figures:
    """What a plan promises, on CUDA of a card of the budget's size. Its times are simulated."""
    return plan_figures(plan) | {
        "budget_bytes": plan.asked_bytes,
        "planned_allocated_bytes": plan.allocated_bytes,
        "planned_reserved_bytes": plan.reserved_bytes,
        "planned_device_bytes": plan.device_bytes,
        "simulated_step_seconds": plan.step_seconds,
        "simulated_slowdown": plan.slowdown,
    }


def _asked(budget: str | int | None) -> str | None:
    return None if budget is None else str(budget)


def _checkpoint_blocks(model: TrainingStep) -> None:
    """Have every residual or decoder block compute again in backward what it made in forward."""
    if hasattr(model.model, "gradient_checkpointing_enable"):  # one of transformers'
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, TransformerBlock | Residual):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


WAYS: dict[str, Callable[..., Way]] = {
    "eager": eager,
    "compile": compiled,
    "checkpoint": checkpointed,
    "save-on-cpu": saved_on_cpu,
    "offload-hooks": offload_hooks,
    "host-optimizer": host_optimizer,
    "overspill": managed,
    "overspill-step": whole_step,
}
