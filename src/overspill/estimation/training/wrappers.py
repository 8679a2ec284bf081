"""Data parallel training as programs write it.

The kinds are DistributedDataParallel, fully_shard and Horovod on several GPUs. PyTorch's own wrappers run (see
capture/virtual_gpu/distributed.py), so buckets, all-gathers and shards are theirs. Horovod need not be installed. Its
gradients stay in place, and each GPU has one fusion buffer (DNNMem, FSE 2020, §4.5).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.costs.nccl import horovod_fusion_bytes
from overspill.job import Parallel
from overspill.job.prepare.checkpointing import sharded_blocks


def data_parallel(module: nn.Module, parallel: Parallel, recorder: Recorder) -> nn.Module:
    """Return `module` on the device and wrapped, inside a capture.

    Raises RequestError if it cannot be wrapped. A model to be sharded may be on the host. Its blocks are then moved to
    the device and cut one after the other, so that the whole model is never there.
    """
    if not dist.is_available():
        raise RequestError(
            "this PyTorch has no torch.distributed, which parallel training needs; install one that has it, or "
            "estimate one GPU"
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=0, world_size=parallel.gpus)
    elif dist.get_world_size() != parallel.gpus:
        raise RequestError(f"the process group has {dist.get_world_size()} processes, not {parallel.gpus}")
    # Each kind wraps a model with parameters to train.
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RequestError(
            f"{type(module).__name__} has no parameter to train, so nothing to send between GPUs; estimate one GPU"
        )
    if parallel.kind == "ddp":
        return _ddp(module.to("cuda"), parallel)
    if parallel.kind == "fsdp":
        return _fsdp(module, parallel)
    return _horovod(module.to("cuda"), recorder)


def _ddp(module: nn.Module, parallel: Parallel) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        module,
        device_ids=[0],
        bucket_cap_mb=parallel.bucket_cap_mb,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        find_unused_parameters=parallel.find_unused_parameters,
        static_graph=parallel.static_graph,
    )


def _fsdp(module: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the module sharded by FSDP, block by block.

    Blocks are sharded one by one and then the rest, as in torch's tutorial and torchtitan; the root is not resharded.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import, for this alone
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415

    shards = parallel.gpus // parallel.replicas
    if parallel.replicas == 1:
        mesh = init_device_mesh("cuda", (shards,))
    else:
        mesh = init_device_mesh("cuda", (parallel.replicas, shards), mesh_dim_names=("replicate", "shard"))
    dtypes = [None if name is None else getattr(torch, name) for name in (parallel.param_dtype, parallel.reduce_dtype)]
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
        "offload_policy": CPUOffloadPolicy() if parallel.cpu_offload else OffloadPolicy(),
    }
    for block in sharded_blocks(module, parallel):
        fully_shard(block, reshard_after_forward=parallel.reshard_after_forward, **options)
    # None: torch keeps the root's parameters until backward, which begins with them.
    root = None if parallel.reshard_after_forward else False
    fully_shard(module, reshard_after_forward=root, **options)
    return module


def _horovod(module: nn.Module, recorder: Recorder) -> nn.Module:
    """Return `module` with Horovod's fusion buffer.

    The buffer is allocated at the first gradient that is ready, and stays. PyTorch's allocator gives it
    (horovod/torch/adapter_v2.cc, `TorchPersistentBuffer`). Gradients are reduced in place.
    """
    size = horovod_fusion_bytes(os.environ)
    buffers: list[torch.Tensor] = []

    def fuse(_: torch.Tensor) -> None:
        if not buffers and size:
            with recorder.communicating():
                buffers.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(fuse)
    return module
