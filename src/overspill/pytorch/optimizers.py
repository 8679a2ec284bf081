"""Optimizers: their tables of hooks, and which ones PyTorch has for all."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from .patching import Target

global_step_pre_hooks = _optimizer._global_optimizer_pre_hooks
"""Hooks before the step of any optimizer."""
global_step_post_hooks = _optimizer._global_optimizer_post_hooks
"""Hooks after it."""

foreach_norm = torch._foreach_norm
"""The norms of several tensors, by the kernel that `clip_grad_norm_` takes on a GPU."""
SCALED_STEP = Target(torch.amp.GradScaler, "_maybe_opt_step")
"""What steps an optimizer unless a gradient has overflowed; it reads values."""
BY_SCHEDULER = "_wrapped_by_lr_sched"
"""The attribute of a `step` that a scheduler has wrapped on the object."""
OF_OPTIMIZER = "_optimizer_"
"""How the attributes of an optimizer begin that hold its hooks."""
STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
"""The attributes of an optimizer that hold the hooks of its step."""


def step_hooks(optimizer: Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return an optimizer's own hooks before and after its step."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def is_initialised(optimizer: Any) -> bool:
    """Return whether `Optimizer.__init__` ran; wrappers of others may leave it out."""
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


def initialise(optimizer: Optimizer) -> None:
    """Give an optimizer the attributes that `Optimizer.__init__` gives, and no other object of its class anything.

    PyTorch would have the class's `step` call hooks from then on, which other objects may not have.
    """
    kind = type(optimizer)
    step = vars(kind).get("step")
    hooked = getattr(kind.step, "hooked", False)
    Optimizer.__setstate__(optimizer, {})
    if not hooked and step is not None:
        kind.step = step
    elif not hooked:
        del kind.step


def note_step(optimizer: Any) -> None:
    """Let schedulers know that an optimizer has stepped, or they warn."""
    optimizer._opt_called = True


def foreach_types() -> list[list[type]]:
    """Return PyTorch's lists of tensor types that optimizers update many at a time, each once."""
    lists = _optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
    return list({id(types): types for types in lists}.values())


def scale_settings(scaler: torch.amp.GradScaler) -> tuple[bool, float]:
    """Return whether a GradScaler scales, and by how much at first."""
    return scaler._enabled, scaler._init_scale
