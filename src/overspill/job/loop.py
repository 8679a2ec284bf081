"""The training loop of a job, as a user would write it: recorded for an estimate, and run by `train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .job import Job

Scaler: TypeAlias = torch.amp.GradScaler


def train_steps(
    job: Job,
    module: nn.Module,
    optimizer: Optimizer | None,
    inputs_of: Callable[[int], Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    scaler: Scaler | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Train one step for each item of the iterator, without end.

    `inputs_of` returns the micro-batch of a number, and `loss_of` its loss. `around` is the context of all that comes
    after a loss. Like a user's loop, it holds batch and loss until the next ones exist.
    """
    while True:
        if optimizer is not None:
            optimizer.zero_grad(job.set_to_none)
        # Micro-batches, whose gradients add up.
        for number in range(job.accumulate):
            inputs = inputs_of(number)
            value = loss_of(module, inputs)
            with around():
                if scaler is not None:
                    value = scaler.scale(value)
                (value / job.accumulate if job.accumulate > 1 else value).backward()
        with around():
            update(job, module, optimizer, scaler)
        yield


def update(job: Job, module: nn.Module, optimizer: Optimizer | None, scaler: Scaler | None) -> None:
    """End a step: clip gradients, by the norm of all and then by value, and update the parameters.

    It goes through the scaler if one is given. Without an optimizer, gradients are freed.
    """
    if optimizer is not None and scaler is not None and job.clips:
        scaler.unscale_(optimizer)
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm)
    if job.clip_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), job.clip_value)
    if optimizer is None:
        module.zero_grad(job.set_to_none)
    elif scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
