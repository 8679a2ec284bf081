"""Training jobs on the stand-in GPU, through either door."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import overspill
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options

DOORS = ("compile", "train_step")

# The stand-in has no cuDNN: PyTorch takes its own kernels.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Job:
    """A job that is ready to run: `step()` trains one step, `plan()` is what was planned, `source` what can be recorded."""

    step: Callable[[], Any]
    plan: Callable[[], Plan]
    source: Any = None


@contextmanager
def job(
    door: str,
    model: str,
    batch: int,
    budget: str | float | None,
    *,
    optimizer: str = "adamw",
    small: bool = False,
    policy: str = "auto",
    tracker: Any = None,
) -> Iterator[Job]:
    """Make a managed job ready; with the door `plain` one of PyTorch alone."""
    torch.manual_seed(0)
    loaded = load(model, small=small)
    step = TrainingStep(loaded).to("cuda")
    inputs = tuple(t.to("cuda") for t in loaded.make_batch(batch))
    made = optimizer_named(optimizer)(step.parameters())
    if door == "train_step":
        whole = overspill.train_step(loaded.module, loaded.loss, made, budget=budget, policy=policy)
        whole.tracker = tracker

        try:
            yield Job(lambda: whole(*inputs), lambda: whole.plans[0], whole)
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
