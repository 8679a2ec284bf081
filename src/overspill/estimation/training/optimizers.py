"""Optimizers on the host, or divided among GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.job import Job, MakeOptimizer

SMALLEST_OFFLOADED = 4096
"""Elements of the smallest parameter that is updated on the host."""


def optimizer_of(job: Job, module: nn.Module) -> Optimizer | None:
    """Return the optimizer of `module` that `job` names, or None if it has none."""
    if job.optimizer is None:
        return None
    if job.offload_optimizer:
        return Offloaded(module.parameters(), job.make_optimizer)
    if job.parallel is not None and job.parallel.shard_optimizer:
        return _sharded(module, job.make_optimizer)
    return job.make_optimizer(module.parameters())


def _sharded(module: nn.Module, make: MakeOptimizer) -> Optimizer:
    """Return the optimizer of ZeRO-1, as in torch.

    Each GPU updates some of the parameters, and sends them to the others.
    """
    with warnings.catch_warnings():  # torch scripts its functional optimizers when this is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - slow, and for this alone

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return ZeroRedundancyOptimizer(trained, make)  # which it calls, no more


class Offloaded(Optimizer):
    """The optimizer on the host, as torchao's CPUOffloadOptimizer.

    It keeps a copy of the parameters on the host. It follows torchao/optim/cpu_offload.py without `offload_gradients`.
    Parameters of fewer than 4096 elements are updated on the GPU. Gradients are copied to the host and stay until they
    are zeroed. Updated values are copied back in place.
    """

    def __init__(self, parameters: Iterable[Tensor], make: MakeOptimizer) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trained, {})
        small = [parameter for parameter in trained if parameter.numel() < SMALLEST_OFFLOADED]
        self._on_device = make(small) if small else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters on the device."""
        loss = None if closure is None else closure()
        if self._on_device is not None:
            self._on_device.step()
        return loss
