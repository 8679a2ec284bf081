"""Distributed training without other GPUs: fake process groups, DDP, and FSDP.

A program requests its process group as usual (`init_process_group("nccl")`, under torchrun's environment or with a
`world_size`). It gets torch's own "fake" group: right sizes, no messages. DistributedDataParallel and fully_shard then
run unchanged. This module handles what does not work on fake tensors:

- C++ makes DDP's buckets (torch/csrc/distributed/c10d/reducer.cpp, `initialize_buckets`), and takes the parameters
  to be on the CPU: the recorder is notified that the buckets are on the device.
- The fake group's work has no result, which the reducer reads (comm.cpp, `parseCppCommHookResult`): `allreduce_` is
  answered here, with its own input.
- A DTensor's device is that of its shard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import nn

from overspill.capture.fake_cuda import retarget
from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.capture.recording.recorder import Recorder
from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.pytorch.distributed import (
    bucket_targets,
    done_work,
    fake_store,
    forget_meshes,
    fsdp_functions,
    fsdp_modules_of_torch,
    local_tensor,
    parameter_path,
    process_group_targets,
    propagation_targets,
    sync_batch_norm,
)
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.modules import buffers_of
from overspill.pytorch.patching import Patches

aten = torch.ops.aten
_UNSET = -1  # torch's own word for a rank or a world size that was not given


@contextmanager
def no_network() -> Iterator[None]:
    """Make process groups fake inside the block, and destroy them after it."""
    if not dist.is_available():
        yield
        return
    others, hook = dist.is_initialized(), sys.excepthook
    try:
        yield
    finally:
        if dist.is_initialized() and not others:
            dist.destroy_process_group()
        if not others:
            sys.excepthook = hook  # init_process_group wraps it, destroy_process_group leaves it wrapped
            if "torch.distributed.tensor" in sys.modules:
                forget_meshes()


def replacements(recorder: Recorder, mode: FastFakeMode, replace: Callable[[Patches], None]) -> Patches:
    """Return (owner, name, replacement) for everything that data parallel training calls.

    `replace` gets patches for sharding with the first process group. torch takes a second to import it, which a program
    on one GPU should not wait for.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    storages: Patches = [(torch.UntypedStorage, "resize_", resized)]
    # The rest needs torch.distributed.
    if not dist.is_available():
        return storages
    waiting = [lambda: [*_dtensor(mode), *_fsdp(recorder, mode)]]

    def with_group() -> None:
        while waiting:
            replace(waiting.pop()())

    return [*storages, *_process_groups(with_group), *_ddp(recorder), *_sync_batch_norm()]


# --- Process groups ---------------------------------------------------------------------------------------------------


def _process_groups(on_group: Callable[[], None]) -> Patches:
    """Return patches for torch.distributed's inner functions, because programs import the outer ones by name.

    `on_group` is called before a group is made.
    """
    from torch.cuda import nccl  # noqa: PLC0415

    targets = process_group_targets()
    make, default_group = targets.make.now, targets.default[0].now
    others = dist.is_initialized()

    # Rank and world size come from arguments, the URL or torchrun's environment.
    def rendezvous(url: str, rank: int = _UNSET, world_size: int = _UNSET, **_: Any) -> Iterator[tuple[Any, int, int]]:
        query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        size = world_size if world_size != _UNSET else _from_environment("WORLD_SIZE", query.get("world_size"))
        if size is None:
            raise RequestError("init_process_group needs a world size: pass world_size=, or set WORLD_SIZE")
        if size < 1:
            raise RequestError(f"a world of {size} processes; it takes at least 1")
        place = rank if rank != _UNSET else _from_environment("RANK", query.get("rank", 0)) or 0
        if not 0 <= place < size:
            raise RequestError(f"rank {place} is outside a world of {size} processes")
        yield fake_store(), place, size

    # Every backend is torch's fake one.
    def fake_group(size: int, rank: int, ranks: list[int], _backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        fake_store()
        on_group()
        kwargs = {**kwargs, "backend_options": None, "device_id": None}
        return make(size, rank, ranks, dist.Backend("fake"), store, *args, **kwargs)

    # A real group of the caller must not be used.
    def group() -> Any:
        if others:
            raise RequestError(
                "a process group with a network is there already, which an estimate must not use: "
                "estimate before init_process_group or after destroy_process_group"
            )
        return default_group()

    return [
        (*targets.rendezvous, rendezvous),
        (*targets.make, fake_group),
        (*targets.timeout, lambda _: timedelta(minutes=10)),
        *((*target, group) for target in targets.default[1:]),
        (*targets.accelerator, lambda *_: torch.device("cuda")),
        # NCCL is there for programs, in a version of torch's wheels; torch itself has no class of its groups.
        (dist, "is_nccl_available", lambda: True),
        (nccl, "version", lambda: (2, 20, 5)),
    ]


def _from_environment(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{name}={text} is no count; write a whole number") from None


def _all_reduce(tensors: list[torch.Tensor], *_: Any, **__: Any) -> tuple[list[torch.Tensor], Any]:
    """Run c10d::allreduce_ in place, with the tensors as the work's result, as in ProcessGroupNCCL."""
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return tensors, done_work(done)


@contextmanager
def answered_ops() -> Iterator[None]:
    """Answer ops that only programs on several GPUs run, inside the block."""
    if not dist.is_available():
        yield
        return
    rows = {torch.ops.c10d.allreduce_.default: _all_reduce, **_SYNCHRONISED}
    retarget.FAKES.update(rows)
    try:
        yield
    finally:
        for op in rows:
            del retarget.FAKES[op]


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def _ddp(recorder: Recorder) -> Patches:
    """Return patches for the functions that make buckets: at first, and once the reducer knows the gradients' order."""
    return [(*target, _communicating(recorder, target.now)) for target in bucket_targets()]


# --- SyncBatchNorm ----------------------------------------------------------------------------------------------------


def _channels(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return `count` tensors of shape [channels], in the dtype of accumulation."""
    dtype = torch.float32 if x.dtype in {torch.float16, torch.bfloat16} else x.dtype
    return [x.new_empty((x.shape[1],), dtype=dtype) for _ in range(count)]


def _reduced(_: torch.Tensor, x: torch.Tensor, mean: Any, invstd: Any, weight: Any, *wanted: bool) -> list[Any]:
    """Return the results of batch_norm_backward_reduce on fake tensors.

    They are two sums, if the input needs a gradient, then those of weight and bias.
    """
    del mean, invstd
    sums = _channels(x, 2) if wanted[0] else [None, None]
    like = x if weight is None else weight
    return sums + [like.new_empty((x.shape[1],)) if w and weight is not None else None for w in wanted[1:]]


# aten/src/ATen/native/cuda/Normalization.cu, which has no implementation for fake tensors.
_SYNCHRONISED: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats.default: lambda x, *_: _channels(x, 2),
    aten.batch_norm_gather_stats_with_counts.default: lambda x, *_: _channels(x, 2),
    aten.batch_norm_elemt.default: lambda x, *_: torch.empty_like(x),
    aten.batch_norm_backward_reduce.default: _reduced,
    aten.batch_norm_backward_elemt.default: lambda _, x, *__: torch.empty_like(x),
}


def _sync_batch_norm() -> Patches:
    """Return patches by which SyncBatchNorm skips its test for empty batches, as torch does under graph capture.

    torch/nn/modules/_functions.py; here every GPU has samples.
    """
    target = sync_batch_norm()
    forward = target.now

    def with_all(*args: Any, **kwargs: Any) -> Any:
        capturing = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            return forward(*args, **kwargs)
        finally:
            torch.cuda.is_current_stream_capturing = capturing

    return [(*target, staticmethod(with_all))]


# --- DTensor and fully_shard ------------------------------------------------------------------------------------------


def _dtensor(mode: FastFakeMode) -> Patches:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    meta, sharding = propagation_targets()
    shapes = meta.now

    def device(tensor: Any) -> torch.device:
        return local_tensor(tensor).device

    def unseen(*args: Any, **kwargs: Any) -> Any:
        """Infer shapes of whole tensors on tensors that are not recorded."""
        before, mode.computing = mode.computing, True
        try:
            return shapes(*args, **kwargs)
        finally:
            mode.computing = before

    # A DTensor is where its shard is.
    return [
        (DTensor, "device", property(device)),
        (DTensor, "is_cuda", property(lambda tensor: local_tensor(tensor).is_cuda)),
        (*meta, unseen),
        (*sharding, _each_once(sharding.now)),
    ]


def _each_once(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """Propagate the sharding of an op on lists once for each distinct element.

    Optimizers have lists of all parameters. torch does it for every element and searches the whole list for each, which
    is quadratic in the number of layers.
    """

    def propagate_once(self: Any, schema: Any) -> Any:
        lists = [value for value in schema.args_schema if isinstance(value, (list, tuple)) and value]
        elementwise = schema.op.name().startswith("aten::_foreach_") and "norm" not in schema.op.name()
        if not elementwise or not lists or len({len(value) for value in lists}) > 1:
            return propagate(self, schema)
        # Ask for the distinct rows only, then spread the answer.
        rows = list(zip(*lists, strict=True))
        distinct = {row: position for position, row in enumerate(dict.fromkeys(rows))}
        if len(distinct) == len(rows):
            return propagate(self, schema)
        columns = iter([type(value)(column) for value, column in zip(lists, zip(*distinct, strict=True), strict=True)])
        few = [next(columns) if isinstance(value, (list, tuple)) and value else value for value in schema.args_schema]
        found = propagate(self, type(schema)(schema.op, tuple(few), schema.kwargs_schema, schema.schema_info))
        if found.needs_redistribute or not isinstance(found.output_spec, (list, tuple, type(None))):
            return propagate(self, schema)
        if found.output_spec is not None:
            found.output_spec = type(found.output_spec)([found.output_spec[distinct[row]] for row in rows])
        found.redistribute_schema = None
        return found

    return propagate_once


def _fsdp(recorder: Recorder, mode: FastFakeMode) -> Patches:
    """Return patches for torch/distributed/fsdp/_fully_shard: kinds of its buffers, parameters and gradients."""
    found = fsdp_modules_of_torch()
    mixins = [getattr(found[0], name, None) for name in ("DefaultAllocMixin", "ProcessGroupAllocMixin")]
    parameter_class = found[1].FSDPParam
    unsharded, reduce = parameter_class.init_all_gather_outputs, found[2].foreach_reduce
    casts, managed = fsdp_functions(found)

    # The recorder learns which tensors are whole parameters and which are gradients.
    def init_all_gather_outputs(parameter: Any, *args: Any, **kwargs: Any) -> None:
        unsharded(parameter, *args, **kwargs)
        for tensor in parameter.all_gather_outputs:
            recorder.mark(tensor, TensorKind.PARAMETER, parameter_path(parameter))

    def foreach_reduce(parameters: list[Any], gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            recorder.mark(gradient, TensorKind.GRADIENT, parameter_path(parameter))
        return reduce(parameters, gradients, *args, **kwargs)

    def managed_states(modules: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Make buffers on the host fake, so that they can be moved to the device in place."""
        for module in modules:
            for name, buffer in buffers_of(module).items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    buffers_of(module)[name] = mode.from_tensor(buffer, static_shapes=True)
        return managed(modules, *args, **kwargs)

    return [
        *((mixin, "allocate", _communicating(recorder, mixin.allocate)) for mixin in mixins if mixin is not None),
        (parameter_class, "init_all_gather_outputs", init_all_gather_outputs),
        *_wherever(found, casts, _communicating(recorder, casts)),
        *_wherever(found, reduce, foreach_reduce),
        *_wherever(found, managed, managed_states),
    ]


def _communicating(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that its tensors count as buffers of collectives."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with recorder.communicating():
            return call(*args, **kwargs)

    return inside


def _wherever(modules: list[Any], function: Callable[..., Any], replacement: Callable[..., Any]) -> Patches:
    """Return patches for `function` in all `modules` that have it; torch moved some between them."""
    name = function.__name__
    return [(module, name, replacement) for module in modules if getattr(module, name, None) is function]
