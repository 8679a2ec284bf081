"""Run the user's own optimizer on chosen parameters, and restore or carry over what it keeps outside of their state.

No copy of an optimizer updates a weight: values that a class keeps on the object, in groups or on the class would be
lost. A change that one step makes there must happen once a step, however many calls carry the step out. A trial must
not change it at all.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.compiling import as_eager
from overspill.capture.flops import moved_bytes, tensors_of_call
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.optimizers import (
    BY_SCHEDULER,
    OF_OPTIMIZER,
    STEP_HOOKS,
    global_step_post_hooks,
    global_step_pre_hooks,
    initialise,
)
from overspill.pytorch.trees import tree_map_only

from .optimizer_outside import FEW, Outside
from .reachable import tensors_in
from .tracker import LiveBytes
from .transfer.forks import ForkedLock

_NO_HOOKS = ForkedLock()


def is_own(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is one of torch.optim, with the step that it has there."""
    kind = type(optimizer)
    if any(of.__module__.split(".")[:2] != ["torch", "optim"] for of in (kind, inspect.unwrap(kind.step))):
        return False
    patched = vars(optimizer).get("step")
    while patched is not None and getattr(patched, BY_SCHEDULER, False):
        patched = getattr(patched, "__wrapped__", None)
    return patched is None or patched is kind.step


def own_step(optimizer: Optimizer) -> None:
    """Call the optimizer's own `step`, even if patched on the object, without any hooks.

    These are its own hooks and those of all optimizers. Nor does a profiler get a range for the step, which would take
    as long as the kernels of a small step.
    """
    step = type(optimizer).step
    with no_hooks(optimizer), torch.enable_grad():  # as a training loop calls it
        if "step" in vars(optimizer):
            optimizer.step()
        else:
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def as_of_now(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of torch.optim with the settings of now, and no parameters, state or hooks.

    It keeps nothing on its object, so that it can step in another thread while the user changes settings.
    """
    made = object.__new__(type(optimizer))
    kept = {k: v for k, v in vars(optimizer).items() if k != "step" and not k.startswith(OF_OPTIMIZER)}
    scaled = {
        k: _copied_to_host(v) for k, v in kept.items() if isinstance(v, Tensor)
    }  # what a GradScaler has put there
    vars(made).update(kept | scaled)
    settings = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    made.param_groups = [{"params": [], **tree_map_only(Tensor, _copied_to_host, of)} for of in settings]
    made.state = defaultdict(dict)
    return made


def _copied_to_host(setting: Tensor) -> Tensor:
    return setting.detach().to("cpu", copy=True)


def plain_step(optimizer: Optimizer) -> None:
    """Call the `step` of an optimizer that `as_of_now` has made."""
    step = type(optimizer).step
    with torch.enable_grad():
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def no_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Call no step hooks of `optimizer`, nor of all optimizers, within the context.

    They keep their places in their tables, over which a step may be looping now. One thread at a time is in it.
    """
    with _NO_HOOKS.lock, _without_hooks(optimizer):
        yield


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    tables: list[dict[int, Any]] = [global_step_pre_hooks, global_step_post_hooks]
    tables += [getattr(optimizer, name) for name in STEP_HOOKS if hasattr(optimizer, name)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.update(dict.fromkeys(table, _nothing))
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _nothing(*_: Any) -> None:
    """Stand in for a hook."""


@contextmanager
def lent(optimizer: Optimizer, parameters: Mapping[int, Sequence[Tensor]]) -> Iterator[None]:
    """Give the group of each number these parameters alone, and other groups none, within the context."""
    kept = [group["params"] for group in optimizer.param_groups]
    groups = [*optimizer.param_groups]
    try:
        for number, group in enumerate(groups):
            group["params"] = [*parameters.get(number, ())]
        yield
    finally:
        for group, before in zip(groups, kept, strict=True):
            group["params"] = before


@contextmanager
def tried(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Give `optimizer` these `parameters` alone, with the settings of `group`, within the context.

    At the end all is as before.
    """
    number = next(n for n, of in enumerate(optimizer.param_groups) if of["params"] is group["params"])
    outside = Outside(optimizer)
    if outside.unknown:
        raise ValueError(f"it keeps a {outside.unknown}")
    outside.hide_states()
    try:
        with as_eager(), lent(optimizer, {number: parameters}):
            optimizer.param_groups[number].update({key: v for key, v in group.items() if key != "params"})
            yield
    finally:
        outside.restore_states()
        outside.restore()


class StepBytes(LiveBytes):
    """Counts live bytes, and the bytes that ops read and write."""

    moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.moved_bytes += moved_bytes(tensors_of_call(func, args, kwargs or {}, result))
        return result


def temporary_bytes(optimizer: Optimizer, tracker: LiveBytes | None = None) -> int:
    """Run one step, and return its temporary bytes.

    Parameters, gradients and the state before it are not included.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    tracker = tracker or LiveBytes(parameters[0].device)
    # What it replaces is held, for the place of a tensor of the state stays taken.
    held = [t for p in parameters for t in (p, p.grad, *tensors_in(optimizer.state.get(p, {})).values())]
    tracker.add(held + Outside(optimizer).tensors)
    settled = tracker.peak_bytes = tracker.live_bytes
    with tracker:
        own_step(optimizer)
    del held
    return tracker.peak_bytes - settled


def copied(optimizer: Optimizer, mode: FakeTensorMode) -> Optimizer:
    """Return a copy for a trial in `mode`, with the same parameters, without their state, and fakes of large tensors.

    Raises the errors of copying, and TypeError for attributes that may lead back to the optimizer or the model.
    """
    made = object.__new__(type(optimizer))
    state: Any = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): made, id(optimizer.state): state}
    memo |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(t): mode.from_tensor(t.detach()) for t in Outside(optimizer).tensors if t.numel() > FEW}
    for key, value in vars(optimizer).items():
        if key == "step" and getattr(value, BY_SCHEDULER, False):
            continue  # which would step the optimizer that the scheduler was made for
        if isinstance(value, (FunctionType, nn.Module)):
            raise TypeError(f"its {key} may lead back to it")
        if not key.startswith(OF_OPTIMIZER):
            vars(made)[key] = copy.deepcopy(value, memo)
    initialise(made)
    return made
