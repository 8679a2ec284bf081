"""Simulated against measured step times on this CPU: the clocked machine with op times and link rates of this machine.

    python bench/simulation_fidelity.py [--models resnet18,unet] [--policies auto,lms] [--threads N] [--json FILE]
    python bench/simulation_fidelity.py --read FILE...      print saved runs again, together

For each model one profiled run gives the time of every op, and the optimizer's. Both stores are calibrated. Each policy
is then compiled once and takes steps with either store; the same schedule is simulated with that store's rates.
Policies that plan for a budget get one halfway between their floor and what the step takes unmanaged. The columns
`simulated` and `measured` are seconds of one step; the measured one is the median after two steps of warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from paired import json_record
from torch import Tensor

from overspill.core import Device
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import MeasuredTimes, op_seconds, signature
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan, unmanaged_peak
from overspill.policies import policy_named
from overspill.runtime.calibrate import _compute_share, _measure_transfers, calibrate
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.concurrent_plans import GraphProblem
from overspill.runtime.compiled.session import Session
from overspill.runtime.compiled.session_budget import SessionBudget
from overspill.runtime.options import Options
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.host_store import HostStore
from overspill.simulate import simulate

CPU = torch.device("cpu")
POLICY_NAMES = ("liveness", "auto", "vdnn-all", "dymem", "superneurons", "lms", "window", "checkpoint")
WARMUP_STEPS = 2
PROFILED_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A built-in model at a size whose step takes about a second here."""

    model: str
    batch: int
    image_size: int | None = None
    seq_len: int | None = None
    small: bool = False


CASES = {
    case.model: case
    for case in (
        Case("resnet18", 16, image_size=128),
        Case("resnet50", 8, image_size=112),
        Case("googlenet", 16, image_size=112),
        Case("vgg-a", 4, image_size=112),
        Case("unet", 1, image_size=128),
        Case("gpt2", 1, seq_len=64),
    )
}


@dataclass(frozen=True)
class Row:
    """One plan with one store: its simulated and its measured step, in seconds."""

    model: str
    batch: int
    image_size: int | None
    seq_len: int | None
    small: bool
    policy: str
    store: str
    offloaded_bytes: int
    recomputed_ops: int
    simulated_step_seconds: float
    simulated_compute_seconds: float
    measured_step_seconds: float
    measured_steps_seconds: tuple[float, ...]
    load_average: float

    @property
    def error(self) -> float:
        """How much longer the simulated step is than the measured one, as a share of the latter."""
        return self.simulated_step_seconds / self.measured_step_seconds - 1

    def line(self) -> str:
        """The row of the table."""
        return (
            f"{self.model:10s} {self.policy:13s} {self.store:6s} {self.offloaded_bytes / 2**20:9.1f} "
            f"{self.recomputed_ops:10d} {self.simulated_step_seconds:10.3f} {self.measured_step_seconds:10.3f} "
            f"{self.error:+8.1%}"
        )


HEADER = (
    f"{'model':10s} {'policy':13s} {'store':6s} {'moved MiB':>9s} {'recomputes':>10s} {'simulated':>10s} "
    f"{'measured':>10s} {'error':>8s}"
)


class HalfwayBudget(SessionBudget):
    """A budget halfway between the policy's floor and the unmanaged peak, for policies that plan for one."""

    def bytes_for(self, problem: GraphProblem[Any], *_: object, **__: object) -> int:
        graph, device = problem.alone, problem.account.device
        unmanaged = unmanaged_peak(graph, device)
        policy = policy_named(problem.options.policy)
        if not policy.plans_for_budget:
            return 2 * unmanaged
        try:
            policy.plan(graph, device, 1)
        except InfeasibleBudgetError as error:
            return error.floor_bytes + max(0, unmanaged - error.floor_bytes) // 2
        return unmanaged


def halfway_session(options: Options) -> Session:
    """A session with such a budget."""
    session = Session(options)
    session._plans.budget = HalfwayBudget(options, session.renewal)
    return session


class Stepper:
    """A job that takes timed steps in `session`."""

    def __init__(self, case: Case, session: Session) -> None:
        torch.manual_seed(0)
        job = load(case.model, small=case.small, image_size=case.image_size, seq_len=case.seq_len)
        module = TrainingStep(job)
        self.batch: tuple[Tensor, ...] = job.make_batch(case.batch)
        self.optimizer = optimizer_named("sgd")(module.parameters())
        session.watch(module, self.optimizer)
        self.call: Callable[..., Tensor] = compile_in(session, module, fullgraph=True)
        self.update_seconds: list[float] = []

    def step(self) -> float:
        """Seconds of one step."""
        begun = time.perf_counter()
        loss = self.call(*self.batch)
        loss.backward()
        loss.item()
        computed = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = time.perf_counter()
        self.update_seconds.append(ended - computed)
        return ended - begun


def calibrated() -> dict[str, Device]:
    """This machine as measured, with the rates of each store."""
    disk = calibrate()
    engine = make_engine(HostStore(), CPU)
    try:
        with torch.no_grad():
            transfers, share = _measure_transfers(engine), _compute_share(engine.store)
    finally:
        engine.close()
    host = replace(
        disk,
        offload_bytes_per_second=transfers.offload_rate,
        prefetch_bytes_per_second=transfers.prefetch_rate,
        transfer_latency_seconds=transfers.latency_seconds,
        full_duplex=transfers.full_duplex,
        transfer_compute_share=share,
    )
    return {"host": host, "disk": disk}


def op_times(case: Case, device: Device) -> MeasuredTimes:
    """The times of all ops of the step, alone on the machine, and that of the optimizer's update."""
    session = halfway_session(Options(policy="liveness", device=device, profile=True))
    with closing(session):
        stepper = Stepper(case, session)
        for _ in range(PROFILED_STEPS):
            stepper.step()
        times = session.measured_times
        assert times is not None
        graph = session.plans[0].graph
        update = statistics.median(stepper.update_seconds[1:])
        of_update = {signature(graph, op): update for op in graph.ops if op.name == "step.update"}
        return replace(times, seconds=times.seconds | of_update)


def measure(case: Case, policy: str, devices: dict[str, Device], times: MeasuredTimes, steps: int) -> Iterator[Row]:
    """The rows of one policy: one for each store, or one alone if it moves nothing."""
    session = halfway_session(Options(policy=policy, device=devices["disk"], times=times, store="disk"))
    with closing(session), tempfile.TemporaryDirectory() as folder:
        stepper = Stepper(case, session)
        stepper.step()
        plan = session.plans[0]
        assert session.engine is not None
        stores = {"host": HostStore(), "disk": DiskStore(folder)} if plan.offloaded_bytes else {"none": HostStore()}
        for name, store in stores.items():
            session.engine.use(store, torch.device("cpu"))
            for _ in range(WARMUP_STEPS):
                stepper.step()
            measured = tuple(stepper.step() for _ in range(steps))
            simulated, compute = simulated_seconds(plan, devices.get(name, devices["host"]), times)
            yield Row(
                **asdict(case),
                policy=policy,
                store=name,
                offloaded_bytes=plan.offloaded_bytes,
                recomputed_ops=plan.recomputed_ops,
                simulated_step_seconds=simulated,
                simulated_compute_seconds=compute,
                measured_step_seconds=statistics.median(measured),
                measured_steps_seconds=measured,
                load_average=os.getloadavg()[0],
            )


def simulated_seconds(plan: Plan, device: Device, times: MeasuredTimes) -> tuple[float, float]:
    """The simulated step on `device`, and what of it the ops would take with nothing beside them."""
    seconds = op_seconds(plan.graph, device, times)
    timeline = simulate(plan.graph, plan.schedule, device, seconds)
    alone = replace(device, transfer_compute_share=0.0)
    return timeline.step_seconds, simulate(plan.graph, plan.schedule, alone, seconds).compute_seconds


@contextmanager
def closing(session: Session) -> Iterator[None]:
    """Close `session` and forget what was compiled for it."""
    try:
        yield
    finally:
        session.close()
        torch._dynamo.reset()


def main(words: Sequence[str] | None = None) -> None:
    """Run the cases, print the table and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--policies", default=",".join(POLICY_NAMES))
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each row")
    parser.add_argument("--threads", type=int, help="compute threads; all cores if not given")
    parser.add_argument("--small", action="store_true", help="the small configurations of the tests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="print saved rows again")
    arguments = parser.parse_args(words)
    if arguments.read:
        rows = [saved_row(row) for file in arguments.read for row in json.loads(file.read_text())["rows"]]
        print("\n".join([HEADER, *(row.line() for row in rows)]))
        summarise(rows)
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    devices = calibrated()
    for name, device in devices.items():
        print(
            f"{name}: out {device.offload_bytes_per_second / 1e9:.2f} GB/s, back "
            f"{device.prefetch_bytes_per_second / 1e9:.2f} GB/s, full duplex {device.full_duplex}, a transfer takes "
            f"{device.transfer_compute_share:.0%} of compute beside it"
        )
    print(f"load average {os.getloadavg()[0]:.2f}, {torch.get_num_threads()} compute threads; times in seconds a step")
    print(HEADER, flush=True)
    rows = []
    for model in arguments.models.split(","):
        case = Case(model, 2, small=True) if arguments.small else CASES[model]
        times = op_times(case, devices["disk"])
        for policy in arguments.policies.split(","):
            for row in measure(case, policy, devices, times, arguments.steps):
                rows.append(row)
                print(row.line(), flush=True)
                if arguments.json:
                    arguments.json.write_text(record(rows, devices))
    summarise(rows)


def summarise(rows: Sequence[Row]) -> None:
    """Print the median error of all rows, and of those with each store."""
    print(f"median error {median_error(rows):.1%} of {len(rows)} rows")
    for store in ("none", "host", "disk"):
        if some := [row for row in rows if row.store == store]:
            print(f"  store {store}: {median_error(some):.1%} of {len(some)}")


def saved_row(saved: dict[str, Any]) -> Row:
    """The row that was written as JSON; its error follows from it."""
    return Row(**{name: value for name, value in saved.items() if name != "error"})


def median_error(rows: Sequence[Row]) -> float:
    """The median of the errors' sizes."""
    return statistics.median(abs(row.error) for row in rows)


def record(rows: Sequence[Row], devices: dict[str, Device]) -> str:
    """What is written as JSON."""
    links = ("offload_bytes_per_second", "prefetch_bytes_per_second", "full_duplex", "transfer_compute_share")
    return json_record(
        CPU,
        stores={name: {link: getattr(device, link) for link in links} for name, device in devices.items()},
        median_error=median_error(rows),
        rows=[asdict(row) | {"error": row.error} for row in rows],
    )


if __name__ == "__main__":
    main()
