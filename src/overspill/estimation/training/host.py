"""Host memory of a job whose updates run there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overspill.job import Job, MakeOptimizer
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.distributed import LOCAL

from .optimizers import SMALLEST_OFFLOADED

_SIDE = 64


def host_bytes(job: Job, module: nn.Module) -> int:
    """Return the bytes of weights, gradients and state on the host for one GPU, or 0 if `job` keeps none there.

    torchao's CPUOffloadOptimizer has a copy of each large parameter on the host, FSDP's CPUOffloadPolicy the shards
    themselves. The state's size follows that of a small matrix.
    """
    offloads_shards = job.parallel is not None and job.parallel.cpu_offload
    if job.optimizer is None or not (job.offload_optimizer or offloads_shards):
        return 0
    found = 0
    for parameter in module.parameters():
        nbytes = _local(parameter).nbytes
        if not parameter.requires_grad:
            found += nbytes * offloads_shards
        elif offloads_shards or parameter.numel() >= SMALLEST_OFFLOADED:
            found += 2 * nbytes + int(_state_share(job.make_optimizer) * nbytes)
    return found


def _state_share(make: MakeOptimizer) -> float:
    """Return the bytes of an optimizer's state over those of its parameter."""
    with disable_current_modes():
        parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = make([parameter])
        optimizer.step()
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor) and value.dim())
        return sum(value.nbytes for value in state) / parameter.nbytes


def _local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the tensor itself."""
    local: Tensor = getattr(tensor, LOCAL, tensor)
    return local
