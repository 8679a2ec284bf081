"""Paired timing: a plain and a managed copy of one job take steps in turn; the ratio is taken pair by pair.

Each copy lives in a process of its own: in one process they would share the C library's heap, whose state either leaves
behind for the other, and times would be off by a third.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from overspill.core.errors import OverspillError
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options


@dataclass(frozen=True)
class Case:
    """One job: a built-in model, its batch, and what `load` takes besides."""

    model: str
    batch: int
    seq_len: int | None = None
    small: bool = False


class Stepper:
    """One copy of a job that can take timed steps; managed if it has a session, else in eager PyTorch or `compiled`."""

    def __init__(
        self, case: Case, device: torch.device, session: Session | None = None, *, compiled: bool = False
    ) -> None:
        torch.manual_seed(0)
        job = load(case.model, small=case.small, seq_len=case.seq_len)
        self.device = device
        self.module = TrainingStep(job).to(device)
        self.batch: tuple[Tensor, ...] = tuple(t.to(device) for t in job.make_batch(case.batch))
        self.optimizer = optimizer_named("sgd")(self.module.parameters())
        self.call: Callable[..., Tensor] = self.module
        if session is not None:
            session.watch(self.module, self.optimizer)
            self.call = compile_in(session, self.module, fullgraph=True)
        elif compiled:
            self.call = torch.compile(self.module, fullgraph=True, dynamic=False)

    def step(self, seed: int) -> tuple[float, float]:
        """Seconds and loss of one step; equal seeds give equal dropout."""
        torch.manual_seed(seed)
        begun = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.call(*self.batch)
        loss.backward()
        self.optimizer.step()
        value = loss.item()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun, value


@dataclass(frozen=True)
class Pairs:
    """Step times of both sides, those of their first steps (plain, managed), whether losses are equal, and the managed plan."""

    plain_seconds: list[float]
    managed_seconds: list[float]
    first_seconds: tuple[float, float]
    losses_identical: bool
    plan: Plan

    def summary(self) -> dict[str, Any]:
        """The figures of one comparison, measured and simulated ones under names of their own."""
        ratios = [m / p for m, p in zip(self.managed_seconds, self.plain_seconds, strict=True)]
        plan = self.plan
        return {
            "budget_bytes": plan.budget_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
            "recomputed_ops": plan.recomputed_ops,
            "plan_seconds": plan.plan_seconds,
            "plain_step_seconds": self.plain_seconds,
            "managed_step_seconds": self.managed_seconds,
            "plain_first_step_seconds": self.first_seconds[0],
            "managed_first_step_seconds": self.first_seconds[1],
            "measured_ratio_median": statistics.median(ratios),
            "measured_ratio_min": min(ratios),
            "measured_ratio_max": max(ratios),
            "simulated_slowdown": plan.slowdown,
            "simulated_exposed_transfer_seconds": plan.timeline.exposed_transfer_seconds,
            "losses_identical": self.losses_identical,
        }


def compare(case: Case, options: Options, device: torch.device, pairs: int, warmup: int = 1) -> Pairs:
    """Step both copies in turn: `warmup` pairs that do not count (compilation, first touch of the store), then `pairs`.

    The plain copy is in eager PyTorch, or under `torch.compile` where the managed one has Inductor's kernels. Raises
    InfeasibleBudget where the managed copy does.
    """
    compiled = options.backend == "inductor"
    with _Side(case, None, device, compiled=compiled) as plain, _Side(case, options, device) as managed:
        return Pairs(*_in_turns(plain, managed, pairs, warmup), managed.plan())


def compiled_ratios(case: Case, device: torch.device, pairs: int, warmup: int = 1) -> list[float]:
    """Step times under `torch.compile` over those of eager PyTorch, pair by pair."""
    with _Side(case, None, device) as eager, _Side(case, None, device, compiled=True) as compiled:
        one, other, *_ = _in_turns(eager, compiled, pairs, warmup)
        return [b / a for a, b in zip(one, other, strict=True)]


def _in_turns(
    one: _Side, other: _Side, pairs: int, warmup: int
) -> tuple[list[float], list[float], tuple[float, float], bool]:
    """The seconds of the steps that count, those of both first ones, and whether all losses are equal.

    Neither runs beside the other's step.
    """
    steps = [(one.step(index), other.step(index)) for index in range(warmup + pairs)]
    counted = steps[warmup:]
    identical = all(a[1] == b[1] for a, b in steps)
    first = steps[0][0][0], steps[0][1][0]
    return [a[0] for a, _ in counted], [b[0] for _, b in counted], first, identical


class _Side:
    """One copy of a job in a process of its own, which finds nothing that another has compiled."""

    def __init__(self, case: Case, options: Options | None, device: torch.device, *, compiled: bool = False) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.cache = tempfile.TemporaryDirectory(prefix="overspill-bench-")
        self.process = context.Process(
            target=_serve, args=(theirs, case, options, str(device), compiled, self.cache.name), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # at which the process ends
        self.process.join()
        self.cache.cleanup()

    def step(self, seed: int) -> tuple[float, float]:
        """Seconds and loss of one step."""
        found: tuple[float, float] = self._asked(seed)
        return found

    def plan(self) -> Plan:
        """The plan of the managed side."""
        found: Plan = self._asked(None)
        return found

    def _asked(self, question: int | None) -> Any:
        self.connection.send(question)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(
    connection: Connection, case: Case, options: Options | None, device: str, compiled: bool, cache: str
) -> None:
    """Take a step for each seed that comes, tell the plan where None comes, and end with the connection."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    session = None if options is None else Session(options)
    try:
        stepper = Stepper(case, torch.device(device), session, compiled=compiled)
        while True:
            seed = connection.recv()
            try:
                connection.send(stepper.step(seed) if seed is not None else session and session.plans[0])
            except OverspillError as error:
                connection.send(error)
    except EOFError:
        pass
    finally:
        if session is not None:
            session.close()


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    found = {
        "cpu": cpu,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found


def json_record(device: torch.device, **figures: Any) -> str:
    """`figures` as JSON, behind the machine that they were measured on, the date (UTC) and the command."""
    begun = {"machine": machine(device), "date": datetime.now(UTC).date().isoformat(), "command": sys.argv}
    return json.dumps(begun | figures, indent=1) + "\n"
