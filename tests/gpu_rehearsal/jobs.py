"""Training jobs on the stand-in GPU, through either door."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import overspill
from overspill.models import BuiltModel, load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options

DOORS = ("compile", "train_step")

torch.backends.cuda.enable_cudnn_sdp(
    False
)  # cuDNN's attention is not in the stand-in; PyTorch then takes its own kernels


@dataclass
class Job:
    """A job that is ready to run: `step()` trains one step, `plan()` is what was planned, `source` what can be recorded."""

    step: Callable[[], Any]
    plan: Callable[[], Plan]
    source: Any = None


@contextmanager
def job(
    door: str,
    model: str | Callable[[], BuiltModel],
    batch: int,
    budget: str | float | None,
    *,
    optimizer: str = "adamw",
    small: bool = False,
    policy: str = "auto",
    tracker: Any = None,
    device: str = "cuda",
    autocast: bool = False,
) -> Iterator[Job]:
    """A managed job; with the door `plain` one of PyTorch alone. `autocast`: its forward and loss in bfloat16 where that is usual."""

    def region() -> AbstractContextManager[None]:
        return torch.autocast("cuda", torch.bfloat16, enabled=autocast)

    torch.manual_seed(0)
    loaded = load(model, small=small) if isinstance(model, str) else model()
    step = TrainingStep(loaded).to(device)
    inputs = tuple(t.to(device) for t in loaded.make_batch(batch))
    made = optimizer_named(optimizer)(step.parameters())
    if door == "train_step":
        whole = overspill.train_step(loaded.module, loaded.loss, made, budget=budget, policy=policy)
        whole.tracker = tracker

        def whole_step() -> torch.Tensor:
            with region():
                return whole(*inputs)

        try:
            yield Job(whole_step, lambda: whole.plans[0], whole)
        finally:
            whole.close(bring_back=False)
        return
    session = Session(Options(budget=budget, policy=policy)) if door == "compile" else None
    call = step
    if session is not None:
        session.watch(step, made)
        session.tracker = tracker
        call = compile_in(session, step, fullgraph=True)

    def train() -> torch.Tensor:
        made.zero_grad(set_to_none=True)
        with region():
            loss = call(*inputs)
        loss.backward()
        with tracker or nullcontext():
            made.step()
        return loss

    try:
        yield Job(train, lambda: session.plans[0] if session is not None else None, session)
    finally:
        if session is not None:
            session.close()
        torch._dynamo.reset()
        gc.collect()
