"""`overspill.compile`: the one line that a user adds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overspill.capture.compiled.trace import recurrent_layers
from overspill.core import Device
from overspill.core.errors import OverspillError
from overspill.costs import MeasuredTimes
from overspill.runtime.options import PLANNED, Options
from overspill.runtime.parallel import whole_models

from .backend import compile_graph
from .session import Session

M = TypeVar("M", bound=Callable[..., Any])


def compile(  # noqa: A001 - named as torch.compile is
    model: M,
    *,
    budget: str | float | None = None,
    policy: str = "auto",
    store: str | None = None,
    store_dir: str | Path | None = None,
    backend: str = "eager",
    device: str | Device | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    reserve: str | float | None = None,
    times: MeasuredTimes | None = None,
    placement: str | None = None,
    checksum: bool = False,
    fullgraph: bool = False,
) -> M:
    """`model`, trained within `budget` bytes of device memory, with the same numbers to the last bit.

    `budget` counts parameters, gradients, optimizer state, buffers, inputs, activations and temporaries: a size
    (`"8GiB"`), a share of what the step needs unmanaged (`0.5`), or None for the whole device. `policy` is a name that
    `overspill policies` lists; `store` is `disk` or `host` on the CPU, `pinned` on CUDA. `optimizer` need only be
    given when it does not exist yet at the first call; else it is found. `reserve` is memory for what you compute
    between forward and backward outside the model. With `placement` the budget holds for where blocks lie, not only for
    their bytes: the name of an allocator or solver. `planned` is the default solver, and on CUDA every step from the
    fourth on gets the addresses that it finds; call it before the model is on the GPU. With `checksum` what comes
    back from the store is compared with what went there; a difference is a StoreError. The plan is made at the first call
    with each input shape.

    Raises RequestError for arguments that cannot be right, and at the first call InfeasibleBudget (with the smallest
    budget that works), UnsupportedError, or StoreError.
    """
    options = Options(
        budget, policy, store, store_dir, backend, device, reserve, times, placement=placement,
        checksum=checksum,
    )  # fmt: skip
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else (None if optimizer is None else list(optimizer))
    module = model if isinstance(model, nn.Module) else None
    session = Session(options, module.parameters() if module is not None else (), optimizers)
    if options.placement == PLANNED and torch.cuda.is_available() and device != "cpu":
        session.place_live()
    return compile_in(session, model, fullgraph=fullgraph)


def compile_in(session: Session, model: M, *, fullgraph: bool = False) -> M:
    """`model` compiled for `session`, which the result carries as its attribute `overspill`.

    In a DistributedDataParallel the forward of the module inside is compiled, in place: from outside, Dynamo finds
    nothing to compile where that forward is torch's own, as in nn.Sequential.
    """
    if isinstance(model, DistributedDataParallel):
        model.module.forward = compile_in(session, model.module.forward, fullgraph=fullgraph)
        model.__dict__["overspill"] = session
        return model
    compiled = torch.compile(
        model, backend=functools.partial(compile_graph, session=session), dynamic=False, fullgraph=fullgraph
    )
    if not isinstance(compiled, nn.Module):
        call = _Call(compiled, session)
        return functools.wraps(model)(call)  # type: ignore[return-value]
    # Set in the instance's own dictionary: OptimizedModule hands ordinary attributes on to the user's module.
    compiled.__dict__["forward"] = _Call(compiled.forward, session)
    compiled.__dict__["overspill"] = session
    return compiled


class _Call:
    """Calls the compiled model; shows errors of ours as they are, without Dynamo's wrapping."""

    def __init__(self, call: Callable[..., Any], session: Session) -> None:
        self._call = call
        self.overspill = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_kept_gradients()
        if self.overspill.steps is not None and torch.is_grad_enabled():
            self.overspill.steps.begin_step()
        try:
            with whole_models(), recurrent_layers():
                return self._call(*args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, OverspillError):
                raise failure.inner_exception.with_traceback(None) from None
            raise

    def _notice_kept_gradients(self) -> None:
        """If gradients of an earlier backward are still there, plan again with room for both, once."""
        session = self.overspill
        if not session.accumulates and torch.is_grad_enabled() and session.gradients_are_kept():
            session.accumulates = True
            if session.plans:
                session.forget_plans()
                torch._dynamo.reset()
