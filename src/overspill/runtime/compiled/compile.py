"""`overspill.compile`: one line that trains a model within a memory budget."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overspill.capture.compiled.kernels import kernel_settings
from overspill.core import Device
from overspill.core.budget import Budget
from overspill.core.errors import OverspillError, RequestError, UnplannedError, UnsupportedError
from overspill.core.progress import shown_in_terminal, tell_terminal
from overspill.core.user_code import last_place
from overspill.costs import MeasuredTimes
from overspill.policies import with_update
from overspill.pytorch.dynamo import InternalTorchDynamoError, TorchRuntimeError
from overspill.pytorch.dynamo_stand_in import uncompiled
from overspill.runtime.ddp import whole_models
from overspill.runtime.hardware import gpu_named, planned_for
from overspill.runtime.optimizers import unwrapped
from overspill.runtime.options import Options
from overspill.runtime.transfer.tiers import Directories

from .backend import backend_of
from .cut_calls import watch_optimizers
from .loop_plans import guards_without
from .plan_check import plans_needed
from .session import Session
from .sharded import ShardedModel
from .step_check import watch_method
from .traced_away import trace_what_is_away

M = TypeVar("M", bound=Callable[..., Any])
_NO_BUDGET = (
    'no budget: a step may take all of the device, and nothing moves while it fits; budget="8GiB" keeps it in 8 GiB'
)


def compile(  # noqa: A001 - named as torch.compile is
    model: M,
    *,
    budget: str | float | None = None,
    policy: str = "auto",
    update: str = "device",
    store: str | None = None,
    store_dir: Directories = None,
    host_budget: str | int | None = None,
    disk_bandwidth: str | None = None,
    backend: str = "eager",
    device: str | torch.device | Device | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    reserve: str | float | None = None,
    times: MeasuredTimes | None = None,
    placement: str | None = None,
    checksum: bool = False,
    on_unplanned: str = "error",
    partition: float | None = None,
    session: Session | None = None,
    fullgraph: bool = False,
) -> M:
    """Return `model`, trained within `budget` bytes of device memory, with bit-equal results.

    The plan is made at the first call with each input shape. Tensors that forward leaves for backward are kept, moved
    to the store, or recomputed. Where parameters, gradients and optimizer state do not fit next to them, these move
    too, and come back when the loop uses them (docs/whole_step.md).

    Args:
        model: A module, a function or a method. Compile it before the loop; the loop stays as it is.
        budget: A size (`"8GiB"`, or bytes), a share of the step's memory without Overspill (`0.5`), `"smallest"`, or
            None for the whole device. It counts parameters, gradients, optimizer state, buffers, inputs, activations
            and temporaries. On CUDA a size is that of the GPU, with context, library workspaces and fragmentation
            (docs/guarantees.md). A share is of the largest step so far.
        policy: A name that `overspill policies` lists.
        update: Where the optimizer's updates run: `"device"`; `"host"`, all that can; or `"auto"`, wherever the step is
            faster (docs/howto/state_in_host_memory.md).
        store: Where bytes go: `disk` (the default) or `host` on the CPU, `pinned` on CUDA; `host+disk` or `pinned+disk`
            have both, the disk for what host memory does not hold.
        store_dir: The directory of the disk store's file, which has no name and vanishes with the process; with `+disk`
            also several, one for each drive.
        host_budget: With `+disk`, the host memory that the store may take; by default nine tenths of what is free.
        disk_bandwidth: With `+disk`, the rates to plan for, as `"7GB/s"`, `"7GB/s,5GB/s"` for reads and writes, or
            `"nvme-pcie4"`; with several drives, those of each.
        backend: The kernels: `eager`, PyTorch's own, or `inductor`, those of `torch.compile` (docs/compiled.md).
        device: The GPU to train on, as `"cuda"`, of a model that is on the CPU, in memory or mapped from its files.
            Its weights come when the plan needs them, so it may be larger than the GPU; frozen ones are read from where
            they are. Or the device to plan for; by default the one that the tensors are on.
        optimizer: Needed only if it does not exist yet at the first call; otherwise it is found by the parameters.
            Its own `step` does each update, one parameter at a time if parameters move.
        reserve: Memory for your computation between forward and backward outside the model, as a size. None: it is
            worked out.
        times: Op times that were measured before, in place of estimates.
        placement: The name of an allocator or solver. The budget then holds for the addresses of blocks, not only for
            their bytes. `planned`, the default on CUDA, gives blocks addresses in an arena; `pytorch` is PyTorch's
            allocator alone.
        checksum: Compare bytes that come back from the store with those written; a difference raises a StoreError.
        on_unplanned: `"error"`: a call that runs without a plan raises UnplannedError. `"warn"`: it warns.
        partition: With `backend="inductor"`, 0 to 1: use the partition for this `activation_memory_budget`. 1 is that
            of `torch.compile`, and so has its bits. None: several are tried.
        session: Share this session's budget with its other models. It has the options; give no others.
        fullgraph: As in `torch.compile`: a graph break is an error.

    Returns:
        The compiled model, of the same type as from `torch.compile`, with its Session as the attribute `overspill`.

    Raises:
        RequestError: For arguments that cannot be right.
        InfeasibleBudgetError: At the first call, with the smallest budget that works.
        UnsupportedError: At the first call, for an unsupported model.
        StoreError: When a transfer is awaited, if the store could not hold or return bytes.
        UnplannedError: If a call, or a part of it, ran without a plan.
    """
    options = Options(
        budget, with_update(policy, update), store, store_dir, backend, planned_for(device), reserve, times,
        placement=placement, checksum=checksum, on_unplanned=on_unplanned, partition=partition,
        host_budget=host_budget, disk_bandwidth=disk_bandwidth,
    )  # fmt: skip
    if isinstance(getattr(model, "__dict__", {}).get("overspill"), Session):
        raise RequestError(
            "this is compiled by Overspill already; to change the budget, compile what it was made of (a module is its "
            "`_orig_mod`)"
        )
    if not callable(model):
        raise RequestError(f"{model!r} is no module, function or method; make the model first, and give that")
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    optimizers = None if given is None else [unwrapped(o) for o in given]
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if session is not None:
        options.check_unset()
        session.add(parameters, optimizers)
    else:
        session = Session(options, parameters, optimizers)
        if options.limit == Budget():
            tell_terminal(_NO_BUDGET)
    session.begin_on_host(_from_host_to(device, model))
    return compile_in(session, model, fullgraph=fullgraph)


def _from_host_to(device: Any, model: Any) -> torch.device | None:
    """Return the GPU that `device` names, for a `model` on the CPU; otherwise None. Raises RequestError."""
    of = getattr(model, "__self__", model)
    if planned_for(device) is device:
        return None
    if not isinstance(of, nn.Module) or isinstance(of, DistributedDataParallel):
        raise RequestError(f"device={str(device)!r} is for a module on the CPU, or its method; move this one itself")
    return gpu_named(device, of)


def compile_in(session: Session, model: M, *, fullgraph: bool = False) -> M:
    """Return `model` compiled for `session`, which becomes its attribute `overspill`.

    In a DistributedDataParallel, the forward of the module inside is compiled, in place. From outside, Dynamo finds
    nothing to compile if that forward is torch's own, as in nn.Sequential.
    """
    if torch.compile is uncompiled:  # in an estimate of the user's script
        return model
    # Compile inside DDP.
    if isinstance(model, DistributedDataParallel):
        model.module.forward = compile_in(session, model.module.forward, fullgraph=fullgraph)
        model.__dict__["overspill"] = session
        return model

    def made() -> Any:  # with a backend of its own, by which Dynamo keeps what it compiles
        options = {"guard_filter_fn": guards_without(session.loop)}
        return torch.compile(model, backend=backend_of(session), dynamic=False, fullgraph=fullgraph, options=options)

    recipe = _Recipe(session.options, model, fullgraph)
    if not isinstance(model, nn.Module):
        return functools.wraps(model)(_Call(made, session, recipe))  # type: ignore[return-value]
    compiled = made()
    # Set in the instance's own dictionary: OptimizedModule hands ordinary attributes on to the user's module, and
    # Dynamo
    # knows a compiled module inside another one by its very type.
    # Lightning compiles the steps of a module with its `dynamo_ctx`; it gets calls that are looked after too.
    compiled.__dict__.update(
        forward=_Call(lambda: made().forward, session, recipe), overspill=session, __reduce_ex__=recipe.reduced,
        dynamo_ctx=functools.partial(compile_in, session, fullgraph=fullgraph),
    )  # fmt: skip
    compiled.register_load_state_dict_pre_hook(_with_prefix)
    compiled.register_load_state_dict_post_hook(lambda module, _: session.follow(module.parameters()))
    return compiled


class _Recipe(NamedTuple):
    """The ingredients of a compiled model, for its copies and pickles.

    These plan again, at their first call.
    """

    options: Options
    model: Any
    fullgraph: bool

    @property
    def name(self) -> str:
        """The model's name in errors."""
        if isinstance(self.model, nn.Module):
            return type(self.model).__name__
        return getattr(self.model, "__name__", "the function")

    def reduced(self, _protocol: Any) -> Any:
        """Return the function and arguments that make the model, for copy and pickle."""
        return _made, tuple(self)


def _made(options: Options, model: Any, fullgraph: bool) -> Any:
    """Compile `model` again; its optimizers are found by its parameters."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return compile_in(Session(options, parameters), model, fullgraph=fullgraph)


def _with_prefix(_: nn.Module, state_dict: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Accept state_dict keys of the original model too; those of a compiled model begin with `_orig_mod.`."""
    inner = f"{prefix}_orig_mod."
    for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(inner)]:
        state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)


class _Call:
    """Calls the compiled model, and checks that it ran by plans.

    `make` compiles the model, once for each choice of kernels by PyTorch's settings, because Dynamo does not guard
    these.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]], session: Session, recipe: _Recipe) -> None:
        self._make = make
        self._calls: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._recipe = recipe
        self.overspill = session
        self._called = False
        self.sharded: ShardedModel | None = None
        self._rows = session.watch_calls.rows(session)
        if isinstance(recipe.model, nn.Module):
            self.__wrapped__ = recipe.model.forward  # whose arguments inspect.signature finds; trainers look at them
        watch_optimizers()  # before a first step, whose closure may be all that calls the model
        watch_method(self, recipe.model, session.watch_calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a part of what is compiled around it, and of its plans
            return self._recipe.model(*args, **kwargs)
        first = not self._called
        if first:  # not before: while it is unpickled, a method's module has no parameters yet
            of = getattr(self._recipe.model, "__self__", self._recipe.model)
            if isinstance(of, nn.Module):
                self.overspill.loop.name(of)
                self.sharded = self.overspill.shard(of)
                self.overspill.follow(of.parameters())
            self._called = True
        # Plan again if needed, and begin a step of the recorder.
        self.overspill.notice_kept_gradients()
        self.overspill.begin_call(id(self), None if self.sharded is None else (args, kwargs))
        if (recorder := self.overspill.recorder) is not None:
            recorder.begin_step()
        # Call the model, then check that planned graphs ran.
        if (call := self._calls.get(settings := kernel_settings())) is None:
            call = self._calls[settings] = self._make()
        trace_what_is_away()
        watch = self.overspill.watch_calls
        before = watch.graphs_run
        with self.overspill.watching(self._rows):
            result = self._rows.run(lambda: self._run(call, args, kwargs, first=first), self.overspill.begin_again)
        watch.check(self._recipe.name, before, self.overspill, args, kwargs, result, self._rows)
        return result

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any, *, first: bool) -> Any:
        """Call the compiled model. Raises its errors, and ours in place of Dynamo's."""
        inside = nullcontext() if self.sharded is None else self.sharded.called()
        shown = shown_in_terminal(f"planning the first step of {self._recipe.name}") if first else nullcontext()
        with inside, whole_models(), plans_needed(self.overspill.options.backend), shown:
            try:
                return call(*args, **kwargs)
            except OverspillError as error:  # it says what is wrong; the frames of Dynamo below do not
                raise error if os.environ.get("OVERSPILL_DEBUG") else error.with_traceback(None) from None
            except (InternalTorchDynamoError, AssertionError, TorchRuntimeError) as error:
                what, in_user, where = str(error).partition("\nfrom user code:")
                failed = re.search(r": got (\w+)\((['\"])(.+)\2\)$", what, re.MULTILINE)
                if not in_user or (isinstance(error, TorchRuntimeError) and not failed):
                    raise
                places = re.findall(r'File "(.+)", line (\d+)', where)
                line = last_place(places).strip(" ()") or ", line ".join(places[-1])
                if failed:
                    raise UnplannedError(
                        f"{self._recipe.name} does not run on this batch: {failed[1]}: {failed[3]} (at {line})\n"
                        "Check its shapes and dtypes: run the model on it without overspill.compile."
                    ) from error
                raise UnsupportedError(
                    f"torch.compile cannot trace {self._recipe.name} ({what.strip()}, at {line}); "
                    "write that otherwise, or use overspill.train_step"
                ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy a method with its object; return a function itself."""
        of = getattr(self._recipe.model, "__self__", None)
        if of is None:
            return self
        method = getattr(type(of), self._recipe.model.__name__).__get__(copy.deepcopy(of, memo))
        return _made(*self._recipe._replace(model=method))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._recipe.reduced(protocol)
