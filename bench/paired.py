"""Paired timing: copies of one job take steps in turn, and ratios are taken pair by pair.

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
from collections.abc import Callable, Sequence
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
        return plan_figures(plan) | {
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


def plan_figures(plan: Plan) -> dict[str, Any]:
    """What a plan takes and moves."""
    return {
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_ops": plan.recomputed_ops,
        "plan_seconds": plan.plan_seconds,
    }


Steps = list[tuple[float, float]]
"""Seconds and loss of each step of one side."""


def steps_in_turn(sides: Sequence[Side], rounds: int, first_seed: int = 0) -> list[Steps]:
    """The steps of each side, of which none runs beside another's; each round has a seed, from `first_seed` on."""
    rows = [[side.step(first_seed + index) for side in sides] for index in range(rounds)]
    return [list(steps) for steps in zip(*rows, strict=True)]


def pairs_of(plain: Steps, managed: Steps, plan: Plan, warmup: int) -> Pairs:
    """Steps that two sides took in turn, as pairs, of which the first `warmup` do not count."""
    return Pairs(
        [seconds for seconds, _ in plain[warmup:]],
        [seconds for seconds, _ in managed[warmup:]],
        (plain[0][0], managed[0][0]),
        all(a[1] == b[1] for a, b in zip(plain, managed, strict=True)),
        plan,
    )


class Side:
    """One copy of a job in a process of its own. It finds nothing compiled but what is in the folder `cache`."""

    def __init__(
        self,
        case: Case,
        options: Options | None,
        device: torch.device,
        *,
        compiled: bool = False,
        cache: Path | None = None,
    ) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.own_cache = tempfile.TemporaryDirectory(prefix="overspill-bench-")
        self.process = context.Process(
            target=_serve,
            args=(theirs, case, options, str(device), compiled, str(cache or self.own_cache.name)),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # at which the process ends
        self.process.join()
        self.own_cache.cleanup()

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
