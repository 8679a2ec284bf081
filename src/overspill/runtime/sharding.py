"""Models that the user has sharded with `fully_shard` (FSDP2), each parameter by its first dimension.

Their groups, mesh and precision are read from FSDP's own state. FSDP's hooks do not run in a planned step: gathers and
scatters are ops of its graph. The parameters of the model stay those of FSDP, DTensors of which each rank has a part.
That part moves between device and store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overspill.capture.compiled.gathers import GatheredGroup
from overspill.core.errors import RequestError, UnsupportedError
from overspill.costs.gloo import GLOO_THREADS, gloo_bytes
from overspill.pytorch.autograd import accumulate_hooks_of, hooks_of
from overspill.pytorch.distributed import (
    LOCAL,
    all_reduce_hook,
    communicators,
    fsdp_groups,
    fsdp_handles,
    fsdp_hooks,
    fsdp_modules,
    fsdp_policy,
    fsdp_state,
    gradient_divisors,
    group_name,
    initialise,
    is_in_forward,
    is_root,
    keep_shard,
    kept_shard,
    local_tensor,
    map_tensors,
    reduce_dtype,
    sharded_tensor,
    whole_size,
)
from overspill.pytorch.modules import forward_hooks

from .collectives import all_gather, lent, reduce_scatter, started
from .parallel import Agreeing, OneProcess
from .parallel import processes_of as unsharded_processes

INSTEAD = "shard it by fully_shard, by its first dimension"


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor itself."""
    found: Tensor = getattr(tensor, LOCAL, tensor)
    return found


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` to which `fully_shard` was applied."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:  # then nobody can have applied it
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def is_called_inside(model: nn.Module) -> bool:
    """Return whether a call of `model` is inside FSDP's own hooks, of it or of a sharded module around it."""
    states = [fsdp_state(module) for module in sharded_modules(model)]
    return any(map(is_in_forward, states)) or (bool(states) and not is_root(states[0]))


def processes_of(model: nn.Module, process_group: dist.ProcessGroup | Literal[False] | None) -> OneProcess:
    """Return the processes that train `model`: those of its mesh if it is sharded.

    Raises RequestError for another group.
    """
    sharding = sharding_of(model)
    if sharding is None:
        return unsharded_processes(model, process_group)
    if process_group is not None and process_group is not sharding.group:
        raise RequestError("the model is sharded by fully_shard over its own mesh; leave process_group out")
    return Agreeing(sharding.group) if sharding.group.size() > 1 else OneProcess()


def sharding_of(model: nn.Module) -> ModelSharding | None:
    """Return how `model` is sharded, or None.

    Raises UnsupportedError for a sharding that a planned step does not support.
    """
    states = list(dict.fromkeys(fsdp_state(module) for module in sharded_modules(model)))
    if not states:
        return None
    for state in states:
        initialise(state)
    return ModelSharding(model, states)


class ShardGroup:
    """Parameters that FSDP gathers together.

    `parameters` are by name.
    """

    def __init__(self, group: Any, names: Mapping[int, str]) -> None:
        """Read the group; `names` are those of the model's parameters, by id."""
        self._told = group
        self.name = group_name(group)
        self.parameters = {names[id(p.sharded_param)]: p for p in group.fsdp_params}
        self.reduce_dtype: torch.dtype | None = reduce_dtype(group)
        self.reshards = group.post_forward_mesh_info is not None
        self.group: dist.ProcessGroup = group.mesh_info.shard_process_group
        self.ranks = self.group.size()
        self.replicas: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
        """The ranks with the same shard, in a mesh of two dimensions (HSDP)."""

    def gather(self, *shards: Tensor, into: Mapping[int, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Start to gather all rows of each parameter from the `shards` of the ranks; return a function that waits.

        Shards are cast before they are sent. Results at positions in `into` are made in that memory.
        """
        each = enumerate(zip(self.parameters.values(), shards, strict=True))
        ends = [self._gather(parameter, shard, into.get(place)) for place, (parameter, shard) in each]
        return lambda: tuple([ends.pop(0)() for _ in shards])

    def _gather(self, parameter: Any, shard: Tensor, into: Tensor | None) -> Callable[[], Tensor]:
        dtype = parameter.param_dtype or parameter.orig_dtype
        rows = parameter.padded_sharded_param_size.numel()
        whole = shard.new_empty(whole_size(parameter), dtype=dtype) if into is None else into
        is_even = rows * self.ranks == whole.numel()
        found = whole.view(-1) if is_even else shard.new_empty(rows * self.ranks, dtype=dtype)
        # Sent from its own place in the result, as FSDP sends it.
        sent = found[rows * self.group.rank() :][:rows]
        sent[: shard.numel()].copy_(shard.detach().reshape(-1))
        wait = started((found, sent), lambda to, part: all_gather(to, part, self.group, async_op=True))

        def end() -> Tensor:
            wait()
            if not is_even:
                whole.view(-1).copy_(found[: whole.numel()])
            return whole

        return end

    def gather_workspace_bytes(self) -> int:
        """Return the bytes that a gather takes in addition to its results.

        These are padded results, and the copies of two threads of gloo.
        """
        copies, padded = [], 0
        for parameter in self.parameters.values():
            itemsize = (parameter.param_dtype or parameter.orig_dtype).itemsize
            part = parameter.padded_sharded_param_size.numel() * itemsize
            if part * self.ranks != whole_size(parameter).numel() * itemsize:
                padded += part * self.ranks
            if parameter.sharded_param.device.type == "cpu":
                copies.append(gloo_bytes("all_gather", part, self.ranks))
        return padded + sum(sorted(copies)[-GLOO_THREADS:])

    def scatter_workspace_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes that a scatter takes in addition to its results: gradients packed, and summed."""
        some = self.parameters[names[0]]
        dtype = self.reduce_dtype or some.param_dtype or some.orig_dtype
        part = sum(self.parameters[name].padded_sharded_param_size.numel() for name in names) * dtype.itemsize
        return part * self.ranks + (0 if some.sharded_param.device.type == "cpu" else part)

    def scatter(self, names: Sequence[str], *gradients: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to average the `gradients` of these parameters over ranks; return a function that waits.

        Its result is this rank's rows. Gradients are packed as in FSDP, because the order affects the last bits of sums
        over more than two ranks.
        """
        parameters = [self.parameters[name] for name in names]
        rows = [parameter.padded_sharded_param_size.numel() for parameter in parameters]
        dtype = self.reduce_dtype or gradients[0].dtype
        packed = self._packed(gradients, rows, dtype)
        factor, sums = self._told.gradient_divide_factor, self._told.force_sum_reduction_for_comms
        before, after, op, over_replicas = gradient_divisors(
            self.group, self.replicas, dtype, packed.device.type, factor, sums
        )
        if before not in (None, 1):
            packed.div_(before)
        if packed.device.type == "cpu" and op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):  # which gloo cannot do
            packed.mul_(1 / factor)
            op = dist.ReduceOp.SUM
        summed = packed[self.group.rank()]
        wait: Callable[[], Any] = bool
        if self.ranks == 1:  # FSDP sums nothing, and divides
            packed.div_(factor or 1)
        elif packed.device.type == "cpu":  # gloo scatters so too, on a copy that it gives back late
            wait = started((packed,), lambda given: dist.all_reduce(given, op, self.group, async_op=True))
        else:
            summed = packed.new_empty(packed.shape[1])
            wait = started(
                (summed, packed.view(-1)), lambda to, given: reduce_scatter(to, given, op, self.group, async_op=True)
            )

        def end() -> tuple[Tensor, ...]:
            wait()
            if self.replicas is not None:
                lent((summed,), lambda given: dist.all_reduce(given, over_replicas, self.replicas))
            if after not in (None, 1):
                summed.div_(after)
            return tuple(
                part[: parameter.sharded_size.numel()].view(parameter.sharded_size).to(parameter.orig_dtype, copy=True)
                for part, parameter in zip(summed.split(rows), parameters, strict=True)
            )

        return end

    def _packed(self, gradients: Sequence[Tensor], rows: list[int], dtype: torch.dtype) -> Tensor:
        """Return the rows of each rank's shards of all gradients, one after another, `[ranks, elements]`."""
        packed = gradients[0].new_zeros((self.ranks, sum(rows)), dtype=dtype)
        for part, gradient in zip(packed.split(rows, 1), gradients, strict=True):
            whole = gradient.reshape(-1)
            for rank, own in enumerate(whole.split(part.shape[1]) if whole.numel() else ()):
                part[rank, : own.numel()].copy_(own)
        return packed


def gathered_group(group: ShardGroup, positions: Mapping[str, int], shard: Callable[[str], Tensor]) -> GatheredGroup:
    """Return the group as a captured graph has it, with the `positions` of its parameters among the inputs.

    `shard` returns the fake value of a rank's part.
    """
    names = {positions[name]: name for name in group.parameters}

    def named(those: Sequence[int]) -> list[str]:
        return [names[position] for position in those]

    return GatheredGroup(
        group.name.removeprefix("model."), tuple(names), tuple(map(shard, group.parameters)), group.ranks,
        group.gather, group.gather_workspace_bytes(),
        lambda *gradients, positions: group.scatter(named(positions), *gradients),
        lambda positions: group.scatter_workspace_bytes(named(positions)), group.reshards,
    )  # fmt: skip


class ModelSharding:
    """How a model is sharded: its groups of parameters, and their ranks."""

    def __init__(self, model: nn.Module, states: Sequence[Any]) -> None:
        """Read the sharding. Raises UnsupportedError if a planned step does not support it."""
        self._states = states
        groups = [group for state in states for group in fsdp_groups(state)]
        self._fsdp_groups = groups
        self.reshard()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in groups:
            _check_group(group, names)
        _check_all_sharded(model, groups)
        self.groups = [ShardGroup(group, names) for group in groups if group.fsdp_params]
        self.parameters = {name: parameter for group in self.groups for name, parameter in group.parameters.items()}
        if len({(id(group.group), id(group.replicas)) for group in self.groups}) != 1:
            raise UnsupportedError(
                "the model is sharded over several meshes; a planned step needs one for all of it: pass the same mesh "
                "to every fully_shard"
            )
        self._shards = self.groups[0].group
        self._mesh = groups[0].mesh_info.mesh
        self._hooks: list[tuple[Any, Any, Any]] = []
        self._casts: list[tuple[Any, Any, Any, Any]] = []
        self._is_taken = False

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self._shards if self.groups[0].replicas is None else _group_of(self._mesh)

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Add `tensor` up, in place, over the ranks that have different shards."""
        lent((tensor,), lambda given: dist.all_reduce(given, group=self._shards))

    # -- between FSDP and the step

    def reshard(self) -> None:
        """Restore the shards where FSDP has left whole parameters, as its root does after a forward.

        Raises UnsupportedError for FSDP settings that a planned step does not follow.
        """
        for group in self._fsdp_groups:
            _check_settings(group)
            group.reshard()

    def take(self) -> None:
        """Move each shard to its own memory, which FSDP does not hold."""
        self._is_taken = True
        for parameter in self.parameters.values():
            local = local_tensor(parameter.sharded_param)
            if kept_shard(parameter).numel():
                keep_shard(parameter, local.new_empty(0))
                if local.untyped_storage().nbytes() != local.nbytes:
                    local.data = local.clone()

    def give_back(self) -> None:
        """Return the shards on the device to FSDP, so that its own hooks can gather them."""
        if not self._is_taken:
            return
        self._is_taken = False
        for parameter in self.parameters.values():
            local = local_tensor(parameter.sharded_param)
            if local.untyped_storage().nbytes() >= local.nbytes:  # else it is a placeholder, and lost
                parameter.reset_sharded_param()

    def hold(self, is_tracing: Callable[[], bool], bring: Callable[[], None]) -> None:
        """Skip FSDP's hooks while `is_tracing`; at other times, call `bring` before they run."""
        for state in self._states:
            before, behind = partial(_cast_inputs, fsdp_policy(state)), partial(_cast_output, fsdp_policy(state))
            # Methods of `register_fsdp_forward_method` call the state's own.
            methods = zip(fsdp_hooks(state).items(), (before, behind), strict=True)
            found = [(vars(state), name, method, cast) for (name, method), cast in methods]
            handles = {handle.id for handle in _handles(state)}
            for module in fsdp_modules(state):
                for table, cast in zip(forward_hooks(module), (before, behind), strict=True):
                    found += [(table, key, table[key], cast) for key in handles & table.keys()]
            for table, key, hook, cast in found:
                self._hooks.append((table, key, hook))
                table[key] = _Held(hook, cast, is_tracing, bring)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Let FSDP's hooks only cast within the context, with the same objects each time: Dynamo traces them."""
        if not self._casts:
            self.hold(lambda: True, lambda: None)
            self._casts = [(table, key, table[key], hook) for table, key, hook in self._hooks]
            self._hooks.clear()
        for table, key, cast, _ in self._casts:
            table[key] = cast
        try:
            yield
        finally:
            for table, key, _, hook in self._casts:
                table[key] = hook

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add this rank's rows of a gradient to those that its parameter has, and call its hooks, as FSDP does."""
        of = self.parameters[name]
        if of.sharded_param.grad is None:
            of.sharded_param.grad = of.to_sharded_dtensor(gradient)
        else:
            local_tensor(of.sharded_param.grad).add_(gradient)
        for hook in accumulate_hooks_of(of.sharded_param).values():
            hook(of.sharded_param)

    def let_go(self) -> None:
        """Restore FSDP's hooks and shards."""
        for table, key, hook in self._hooks:
            table[key] = hook
        self._hooks.clear()
        self.give_back()


class _Held:
    """One of FSDP's forward hooks while a step has the model."""

    def __init__(
        self, hook: Callable[..., Any], cast: Callable[..., Any], is_tracing: Callable[[], bool], bring: Any
    ) -> None:
        self._hook, self._cast, self._is_tracing, self._bring = hook, cast, is_tracing, bring

    def __call__(self, *given: Any) -> Any:
        if self._is_tracing():
            return self._cast(*given)
        self._bring()
        return self._hook(*given)


def _cast_inputs(policy: Any, _: nn.Module, args: Any, kwargs: Any) -> Any:
    if not (policy.cast_forward_inputs and policy.param_dtype):
        return args, kwargs
    return _cast(policy.param_dtype, args), _cast(policy.param_dtype, kwargs)


def _cast_output(policy: Any, _: nn.Module, _args: Any, output: Any) -> Any:
    return output if policy.output_dtype is None else _cast(policy.output_dtype, output)


def _cast(dtype: torch.dtype, values: Any) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, values)


def _handles(state: Any) -> Iterator[Any]:
    for handle in fsdp_handles(state):
        yield from getattr(handle, "handles", (handle,))


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh."""
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)


# -- what is refused


def _check_group(group: Any, names: Mapping[int, str]) -> None:
    where = group_name(group) or "the model"
    if not hasattr(group.mesh_info, "shard_process_group"):
        raise UnsupportedError(
            f"{where} is replicated and not sharded; pass it to train_step as it is, with process_group"
        )
    if group.post_forward_mesh_info is not None and group.post_forward_mesh_info is not group.mesh_info:
        raise UnsupportedError(
            f"{where} is sharded with an integer reshard_after_forward; use True: the plan itself keeps what is worth "
            "it"
        )
    for parameter in group.fsdp_params:
        _check_parameter(parameter, where, names)


def _check_settings(group: Any) -> None:
    """Raise UnsupportedError for a setting of FSDP that would change numbers and is not followed.

    Divisors and sums are followed. Other settings only decide when FSDP gathers and into which memory; the plan decides
    that.
    """
    replicated = getattr(group.mesh_info, "replicate_process_group", None) is not None
    other = [not type(comm).__name__.startswith(("Default", "ProcessGroupAlloc")) for comm in communicators(group)]
    for is_set, told in (
        (not group.reduce_grads, "set_requires_gradient_sync(False)"),
        (replicated and not group.all_reduce_grads, "set_requires_all_reduce(False)"),
        (
            not group.reshard_after_backward,
            "set_reshard_after_backward(False)",
        ),  # FSDP then trains on with old parameters
        (getattr(group, "reduce_scatter_unused_params", False), "set_reduce_scatter_unused_params(True)"),
        (all_reduce_hook(group) is not None, "set_all_reduce_hook"),
        (other[0], "set_custom_all_gather or set_symm_mem_for_comm"),
        (other[1], "set_custom_reduce_scatter or set_symm_mem_for_comm"),
    ):
        if is_set:
            raise UnsupportedError(
                f"{group_name(group) or 'the model'} was told {told}, which a planned step does not do; leave it as "
                "it was (accumulate= adds micro-batches up)"
            )


def _check_parameter(parameter: Any, where: str, names: Mapping[int, str]) -> None:
    name = names.get(id(parameter.sharded_param))
    if name is None:
        raise UnsupportedError(f"a parameter of {where} is not the model's any more; apply fully_shard anew")
    if parameter.is_dtensor:
        raise UnsupportedError(f"{name} is split over ranks before fully_shard (tensor parallelism); {INSTEAD}")
    if parameter.fsdp_placement.dim != 0:
        raise UnsupportedError(f"{name} is sharded by dimension {parameter.fsdp_placement.dim}; {INSTEAD}")
    if parameter.offload_to_cpu:
        raise UnsupportedError(
            f"{where} is sharded with a CPUOffloadPolicy; leave it out: the budget says what is on the device"
        )
    if hasattr(sharded_tensor(parameter), "fsdp_pre_all_gather"):
        raise UnsupportedError(f"{name} is gathered by its own fsdp_pre_all_gather, as float8 weights are; {INSTEAD}")
    if hooks_of(parameter.sharded_param):
        raise UnsupportedError(f"{name} has a gradient hook, which fully_shard does not call; remove it")


def _check_all_sharded(model: nn.Module, groups: Sequence[Any]) -> None:
    known = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    for name, parameter in model.named_parameters():
        if id(parameter) in known:
            continue
        if hasattr(parameter, LOCAL):
            raise UnsupportedError(f"{name} is split over ranks by other means than fully_shard; {INSTEAD}")
        if parameter.requires_grad:
            raise UnsupportedError(
                f"{name} is trained and not sharded (ignored_params, or fully_shard of parts only), so its gradient "
                "would be each rank's own; freeze it, or apply fully_shard to the whole model too"
            )
