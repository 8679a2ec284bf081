"""Training jobs: plan one without memory, or run it within a budget and prove the numbers."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.core import Device, Graph
from overspill.core.errors import OverspillError, RequestError, StoreError
from overspill.costs import MeasuredTimes
from overspill.models import Job, check_optimizer, optimizer_named
from overspill.models.step import TrainingStep
from overspill.policies.planning import Plan

from .allocator import serving
from .compile import compile_in
from .session import Options, Session
from .tracker import LiveBytes

SEED = 0


@dataclass(frozen=True)
class Training:
    """What to train: `build` makes the job anew (weights and data follow from the seed), `device` is cpu or cuda."""

    build: Callable[[], Job]
    batch: int
    optimizer: str = "sgd"
    steps: int = 3
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.batch < 1:
            raise RequestError(f"batch {self.batch} is not a positive number")
        if self.steps < 1:
            raise RequestError(f"{self.steps} steps are not a positive number")
        check_optimizer(self.optimizer)
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise RequestError("this machine has no CUDA device; train on --device cpu")


@dataclass
class Run:
    """What one run gave: the loss and seconds of each step, the measured peak, and the final weights and buffers."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    measured_peak_bytes: int = 0
    reserved_peak_bytes: int | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    offloaded_bytes: int = 0
    times: MeasuredTimes | None = None

    def identical_to(self, other: Run) -> bool:
        """Whether losses and final state are equal to the last bit."""
        return (
            [struct.pack("d", loss) for loss in self.losses] == [struct.pack("d", loss) for loss in other.losses]
            and self.state.keys() == other.state.keys()
            and all(same_bits(value, other.state[name]) for name, value in self.state.items())
        )


def preview(training: Training, options: Options) -> Plan:
    """The plan of a job, made on fake tensors: no memory, no run, and the same plan that the run would make."""
    session = _PlanOnly(options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        step, batch = _prepare(training, "cpu")
        session.watch(step, optimizer_named(training.optimizer)(step.parameters()))
        compiled = compile_in(session, step, fullgraph=True)
        try:
            compiled(*batch)
        except _Planned as planned:
            return planned.plan
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, _Planned):
                return failure.inner_exception.plan
            raise
        finally:
            torch._dynamo.reset()
    raise OverspillError(
        f"{step.model.__class__.__name__} gave no graph that could be planned; does its loss need gradients?"
    )


def step_graph(training: Training, device: str | Device, *, state_moves: bool = False) -> Graph:
    """The Graph of one step of a job, captured on fake tensors, for any policy to plan on `device`."""
    return preview(training, Options("1024TiB", "liveness", device=device, state_moves=state_moves)).graph


def train(training: Training, options: Options, on_step: Callable[[int, float], None] | None = None) -> Run:
    """Train within the budget. Raises what planning and the store raise; nothing is left in the store directory."""
    session = Session(options)
    try:
        run = _train(training, session, on_step)
        run.plan = session.plans[0] if session.plans else None
        run.offloaded_bytes = session.engine.offloaded_bytes // training.steps if session.engine else 0
        run.times = session.measured_times
        return run
    finally:
        session.close()
        torch._dynamo.reset()  # Dynamo keeps what it compiled, and refuses the same class after some sessions


def train_plain(training: Training, options: Options, on_step: Callable[[int, float], None] | None = None) -> Run:
    """The same steps without Overspill: the reference that a managed run must equal.

    That is eager PyTorch; under Inductor, whose kernels follow from the saved tensors, the same plan without transfers.
    """
    if options.backend == "inductor":
        return train(training, replace(options, transfers=False), on_step)
    return _train(training, None, on_step)


def _train(training: Training, session: Session | None, on_step: Callable[[int, float], None] | None) -> Run:
    device = torch.device(training.device)
    step, batch = _prepare(training, training.device)
    optimizer = optimizer_named(training.optimizer)(step.parameters())
    model: Callable[..., Tensor] = step
    if session is not None:
        session.watch(step, optimizer)
        model = compile_in(session, step, fullgraph=True)
    run = Run()
    torch.manual_seed(SEED + 1)
    with _measured(device, session, [*step.parameters(), *step.buffers(), *batch], run) as watching:
        for index in range(training.steps):
            begun = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            with watching() if session is None else nullcontext():
                loss = model(*batch)
            with watching():
                loss.backward()
                optimizer.step()
            run.losses.append(loss.item())
            run.step_seconds.append(time.perf_counter() - begun)
            del loss
            if on_step is not None:
                on_step(index, run.losses[-1])
    run.state = {name: value.detach().clone() for name, value in step.state_dict().items()}
    return run


@contextmanager
def _measured(
    device: torch.device, session: Session | None, persistent: list[Tensor], run: Run
) -> Iterator[Callable[[], Any]]:
    """Measure the peak of what runs inside: by counting storages on the CPU, by the allocator's own figures on CUDA."""
    if device.type == "cuda" and (ours := serving()) is not None:
        yield nullcontext
        found = ours.statistics()
        run.measured_peak_bytes, run.reserved_peak_bytes = found.peak_allocated_bytes, found.peak_reserved_bytes
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield nullcontext
        run.measured_peak_bytes = torch.cuda.max_memory_allocated(device)
        run.reserved_peak_bytes = torch.cuda.max_memory_reserved(device)
        return
    tracker = LiveBytes(device)
    tracker.add(persistent)
    if session is not None:
        session.tracker = tracker
    yield lambda: tracker
    run.measured_peak_bytes = tracker.peak_bytes


def _prepare(training: Training, device: str) -> tuple[TrainingStep, tuple[Tensor, ...]]:
    torch.manual_seed(SEED)
    try:
        job = training.build()
        step, batch = TrainingStep(job), job.make_batch(training.batch)
        if device != "cpu":
            step, batch = step.to(device), tuple(t.to(device) for t in batch)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise StoreError(
                f"the model and its batch alone do not fit in memory: {str(error).splitlines()[0]}"
            ) from None
        raise
    return step, batch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch's or Python's way to say that memory ran out."""
    signs = ("can't allocate memory", "std::bad_alloc", "can't start new thread")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(error) for sign in signs)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes (unlike `==`, true for equal NaNs and false for 0.0 and -0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


class _Planned(Exception):
    """Carries a plan out of the compiler, which then need not go on."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("planned")
        self.plan = plan


class _PlanOnly(Session):
    """A session that stops once the plan is made."""

    def engine_for(self, plan: Plan, device: torch.device) -> int:  # noqa: ARG002
        raise _Planned(plan)
