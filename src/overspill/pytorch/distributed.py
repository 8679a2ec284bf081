"""Process groups, DistributedDataParallel, FSDP2 and DTensor. Some are imported where they are used: they take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .patching import Target

LOCAL = "_local_tensor"
"""The attribute of a DTensor that holds this rank's shard."""


def default_store() -> dist.Store:
    """Return the store that all ranks of the default process group share."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415 - only where torch has it

    return _get_default_store()


def group_names() -> dict[dist.ProcessGroup, str]:
    """Return the process groups of this process, by which functional collectives are called."""
    from torch.distributed.distributed_c10d import _world  # noqa: PLC0415 - only where torch has it

    return _world.pg_names


def active_ddp() -> Any:
    """Return the DistributedDataParallel whose forward runs, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor."""
    return tensor._local_tensor


def largest_shard(tensor: Any) -> Tensor:
    """Return a tensor without memory that has the shape of the largest rank's shard of a DTensor; any other itself."""
    local: Tensor | None = getattr(tensor, LOCAL, None)
    if local is None:
        return tensor
    shape = list(tensor.shape)
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return local.new_empty(1).expand(shape)


def done_work(future: Any) -> Any:
    """Return the handle of a collective that is done, as C++ expects it."""
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def forget_meshes() -> None:
    """Clear DTensor's caches of sharded ops, which refer to meshes of a destroyed process group."""
    from torch.distributed.tensor import DTensor, _random  # noqa: PLC0415 - takes a second

    _random._rng_tracker = None
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # since 2.11
        torch._C._clear_DTensor_sharding_propagator_cache()


# FSDP2 (torch.distributed.fsdp.fully_shard): the state of a sharded module, its groups, and their parameters


def fsdp_state(module: Any) -> Any:
    """Return the state of a module that `fully_shard` was applied to, initialised."""
    return module._get_fsdp_state()


def initialise(state: Any) -> None:
    """Let FSDP find its root, as its first forward does."""
    if state._is_root is None:
        state._lazy_init()


def is_root(state: Any) -> bool:
    """Return whether no module around that of a state is known to be sharded too."""
    return state._is_root is not False


def is_in_forward(state: Any) -> bool:
    """Return whether FSDP's own forward of a module is running."""
    return state._training_state.name == "FORWARD"


def fsdp_groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters of a sharded module: up to PyTorch 2.11 one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_policy(state: Any) -> Any:
    """Return the MixedPrecisionPolicy of a sharded module."""
    return state._mp_policy


def fsdp_modules(state: Any) -> Sequence[nn.Module]:
    """Return the modules that one call of `fully_shard` took together."""
    return state._modules


def fsdp_hooks(state: Any) -> dict[str, Callable[..., Any]]:
    """Return the two methods that FSDP calls before and after forward, by their names."""
    return {"_pre_forward": state._pre_forward, "_post_forward": state._post_forward}


def fsdp_handles(state: Any) -> tuple[Any, Any]:
    """Return the handles by which these are registered, before and after forward."""
    return state._pre_forward_hook_handle, state._post_forward_hook_handle


def group_name(group: Any) -> str:
    """Return the path of the module that a group of parameters is of; empty for the whole model."""
    return str(group._module_fqn or "")


def reduce_dtype(group: Any) -> torch.dtype | None:
    """Return the dtype in which gradients are summed; None for their own."""
    return group._reduce_dtype


def communicators(group: Any) -> tuple[Any, Any]:
    """Return the objects that gather a group's parameters and scatter its gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def all_reduce_hook(group: Any) -> Any:
    """Return the hook that `set_all_reduce_hook` has set, or None."""
    return group._all_reduce_hook


def gradient_divisors(*given: Any) -> tuple[Any, Any, Any, Any]:
    """Return the divisors of gradients before and after they are summed, and the two reductions."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: PLC0415 - takes half a second

    return _fsdp_collectives._get_gradient_divide_factors(*given)


def set_on_modules(parameter: Any, tensor: Tensor) -> None:
    """Let all modules that have a sharded parameter have `tensor` in its place."""
    parameter._setattr_on_modules(tensor)


def whole_size(parameter: Any) -> torch.Size:
    """Return the shape of a whole sharded parameter."""
    return parameter._orig_size


def whole_stride(parameter: Any) -> tuple[int, ...]:
    """Return the strides of a whole sharded parameter."""
    return parameter._contiguous_orig_stride


def parameter_path(parameter: Any) -> str:
    """Return the path of a sharded parameter; empty before the first forward."""
    return parameter._param_fqn or ""


def kept_shard(parameter: Any) -> Tensor:
    """Return the padded shard that FSDP keeps of a parameter."""
    return parameter._sharded_param_data


def keep_shard(parameter: Any, shard: Tensor) -> None:
    """Let FSDP keep another one."""
    parameter._sharded_param_data = shard


def sharded_tensor(parameter: Any) -> Any:
    """Return the shard as the user's own tensor subclass, which may gather itself."""
    return parameter._sharded_local_tensor


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return nested `values` with each tensor mapped, as FSDP casts inputs and outputs."""
    from torch.distributed.utils import _apply_to_tensors  # noqa: PLC0415 - only where torch has it

    return _apply_to_tensors(function, values)


# What the virtual GPU replaces


class ProcessGroupTargets(NamedTuple):
    """The functions that make a process group."""

    rendezvous: Target
    make: Target
    timeout: Target
    default: tuple[Target, ...]  # where the default group is asked for, its home first
    accelerator: Target


def process_group_targets() -> ProcessGroupTargets:
    """Return torch.distributed's inner functions; programs import the outer ones by name."""
    from torch.distributed import device_mesh, distributed_c10d  # noqa: PLC0415 - only where torch has them
    from torch.nn.parallel import distributed as ddp  # noqa: PLC0415

    asking = (distributed_c10d, device_mesh, ddp)
    return ProcessGroupTargets(
        Target(distributed_c10d, "rendezvous"),
        Target(distributed_c10d, "_new_process_group_helper"),
        Target(distributed_c10d, "_get_default_timeout"),
        tuple(Target(where, "_get_default_group") for where in asking),
        Target(torch._C, "_get_accelerator"),
    )


def fake_store() -> Any:
    """Return a store for process groups of the "fake" backend, which the import registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    return FakeStore()


def bucket_targets() -> tuple[Target, ...]:
    """Return the makers of DistributedDataParallel's buckets: at first, and once it knows the gradients' order."""
    reducer = dist.Reducer
    return Target(reducer, "__init__"), Target(reducer, "_rebuild_buckets"), Target(dist, "_broadcast_coalesced")


def sync_batch_norm() -> Target:
    """Return the forward of SyncBatchNorm's autograd function."""
    from torch.nn.modules._functions import SyncBatchNorm  # noqa: PLC0415

    return Target(SyncBatchNorm, "forward")


def propagation_targets() -> tuple[Target, Target]:
    """Return the functions that find the shape of a DTensor op's result, and how it is sharded."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: PLC0415 - takes a second

    names = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
    meta, sharding = (Target(ShardingPropagator, name) for name in names)
    return meta, sharding


def fsdp_modules_of_torch() -> list[Any]:
    """Return FSDP2's modules: collectives, parameters, groups, initialisation and state."""
    from torch.distributed.fsdp import _fully_shard  # noqa: PLC0415 - takes a second

    names = ("_fsdp_collectives", "_fsdp_param", "_fsdp_param_group", "_fsdp_init", "_fully_shard")
    return [import_module(f"{_fully_shard.__name__}.{name}") for name in names]


def fsdp_functions(modules: Sequence[Any]) -> tuple[Any, Any]:
    """Return the functions that cast parameters before a gather, and list the tensors that FSDP moves to the device."""
    return modules[0]._get_param_all_gather_inputs, modules[3]._get_managed_states
