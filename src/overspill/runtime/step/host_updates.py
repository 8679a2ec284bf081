"""Updates on the host: what they go by while the user's loop goes on.

The thread of the host steps on the store's own memory, with an optimizer that has the settings as they were in the
step: a scheduler may have changed those of the user's object meanwhile. Optimizers of torch.optim that treat each
element by itself keep nothing on their objects, and can step so. Others step on the user's own objects, and the step
waits for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overspill.core.errors import UnsupportedError
from overspill.runtime.optimizer_step import as_of_now
from overspill.runtime.transfer.host_lane import HostLane

from .residency import readable


@dataclass(frozen=True)
class AsOfStep:
    """Settings of optimizers as they were in a step."""

    optimizers: Mapping[Any, Optimizer]
    """Those that need not be the user's own object, by OptimizerUpdates."""
    numbers: Mapping[str, int]
    """The group of each parameter, by name."""
    factors: Mapping[str, tuple[float | Tensor, ...]]
    """What the gradient of a parameter has to be multiplied by first."""
    rest: Mapping[str, Mapping[str, Any]]
    """The state of each parameter that does not move, such as step counts, on tensors that nobody else has."""


_NOW: ContextVar[AsOfStep | None] = ContextVar("as_of_step", default=None)


def as_of_step() -> AsOfStep | None:
    """Return the settings for an update on the host; None in one on the device."""
    return _NOW.get()


def begin_updates(lane: HostLane, updated: Iterable[Any]) -> None:
    """Let `lane` update the parameters of each ParameterState with the settings of now."""
    owned = list(updated)
    optimizers = dict.fromkeys(of.updates for of in owned)
    for of in optimizers:
        _check(of.optimizer)
    now = AsOfStep(
        {of: as_of_now(of.optimizer) for of in optimizers if of.groups},
        {of.name: of.updates.number_of(of.group) for of in owned},
        {of.name: of.factors for of in owned if of.factors},
        {of.name: {key: _own(v) for key, v in of.content.items() if key not in of.leaves} for of in owned},
    )
    lane.context = _with(now)
    # What makes the state that the user's optimizer has is awaited.
    makes_state = any(not of.content and (of.leaves or of.needs.rest_bytes) for of in owned)
    lane.ends_with_step = makes_state or not all(of.groups for of in optimizers)


def _own(value: Any) -> Any:
    """Return what no one else has of a value of the state, on the host: optimizers have step counts on the GPU too."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        value.data = value.data.cpu()
    return value.detach()


def counts_on(device: torch.device, group: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Bring step counts that an update on the host has left there to where one on `device` has them."""
    if device.type != "cpu" and (group.get("fused") or group.get("capturable")):
        for value in rest.values():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                value.data = value.data.to(device)


def tell_of_others(on_host: Collection[str], updated: Iterable[str]) -> None:
    """Warn of parameters whose updates were to be on the host, and are on the device."""
    if others := [readable(name) for name in updated if name not in on_host]:
        warnings.warn(
            f'update="host": {", ".join(others)} stay on the device, with their updates: they, their state or their '
            "gradients cannot move",
            stacklevel=2,
        )


def _check(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot step in host memory."""
    why = ""
    if any(group.get("capturable") for group in optimizer.param_groups):
        why = "capturable=True"
    elif type(optimizer).__module__.partition(".")[0] == "bitsandbytes":
        why = "kernels for the GPU alone"
    if why:
        raise UnsupportedError(f"{type(optimizer).__name__} has {why} and cannot update on the host; leave update= out")


def _with(now: AsOfStep) -> Context:
    context = copy_context()
    context.run(_NOW.set, now)
    return context
