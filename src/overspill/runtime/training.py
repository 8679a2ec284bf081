"""Training jobs: run one within a budget, and verify the numbers."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core import Phase
from overspill.core.errors import RequestError, StoreError, is_out_of_memory
from overspill.costs import MeasuredTimes
from overspill.devices import load_device
from overspill.job import Job
from overspill.job.loop import train_steps
from overspill.job.prepare import attention_kernel
from overspill.models.drawing import drawing_from
from overspill.models.step import TrainingStep
from overspill.plans.plan import Plan
from overspill.pytorch.dynamo import reset_dynamo
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.trees import tree_leaves

from . import accelerator, batches
from .capture_job import SEED, prepared_step
from .compiled.compile import compile_in
from .compiled.session import Session
from .hardware import device_noun, usable_bytes
from .options import Options
from .reachable import same_bits
from .recording.attach import recording
from .recording.record import RunRecord
from .recording.recorder import RunRecorder
from .recording.sources import sources_of
from .step.train_step import TrainStep
from .tracker import LiveBytes

STEPS = 3
"""Default number of steps."""


@dataclass
class Run:
    """The results of one run."""

    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds of each step."""
    measured_peak_bytes: int = 0
    """Measured peak of live bytes."""
    planned_peak_bytes: int = 0
    """Planned peak of live bytes."""
    planned_reserved_bytes: int | None = None
    """Planned bytes of PyTorch's allocator; on CUDA."""
    planned_device_bytes: int | None = None
    """Planned bytes of the GPU: reserved bytes and the context; on CUDA."""
    reserved_peak_bytes: int | None = None
    """Measured peak bytes of PyTorch's allocator; on CUDA."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Final weights and buffers, in host memory."""
    plan: Plan | None = None
    partition: float | None = None
    """The `activation_memory_budget` of Inductor's programs."""
    offloaded_bytes: int = 0
    """Bytes that a step offloads."""
    times: MeasuredTimes | None = None
    record: RunRecord | None = field(default=None, repr=False)
    """The measured record of the run, if requested."""

    def identical_to(self, other: Run) -> bool:
        """Return whether losses and final state are equal to the last bit."""
        return (
            [struct.pack("d", loss) for loss in self.losses] == [struct.pack("d", loss) for loss in other.losses]
            and self.state.keys() == other.state.keys()
            and all(same_bits(value, other.state[name]) for name, value in self.state.items())
        )


def train(
    job: Job,
    options: Options,
    on_step: Callable[[int, float], None] | None = None,
    recorder: RunRecorder | None = None,
    *,
    steps: int = STEPS,
    device: str = "cpu",
    keep_state: bool = True,
) -> Run:
    """Train on `device`, cpu or cuda, within the budget.

    With `keep_state`, the result has a copy of the final weights and buffers. `recorder`, whose steps are marked by
    hand, records the run. Raises the errors of planning and of the store. No file remains in the store directory.
    """
    running = _running(job, options, steps, device, on_step, recorder, keep_state=keep_state)
    if options.whole_step:
        return _train_whole(running, options)
    session = Session(options)
    try:
        run = _train(running, session, compiled=options.backend == "inductor")
        run.plan = session.plans[0] if session.plans else None
        run.planned_peak_bytes = run.plan.peak_bytes if run.plan is not None else 0
        run.planned_reserved_bytes, run.planned_device_bytes = session.reserved_bytes, session.device_bytes
        run.partition = session.partitions[0] if session.plans else None
        run.offloaded_bytes = session.engine.offloaded_bytes // steps if session.engine else 0
        run.times = session.measured_times
        return run
    finally:
        session.close()
        reset_dynamo()  # Dynamo keeps what it compiled, and refuses the same class after some sessions


def train_plain(
    job: Job,
    options: Options,
    on_step: Callable[[int, float], None] | None = None,
    partition: float | None = None,
    *,
    steps: int = STEPS,
    device: str = "cpu",
    keep_state: bool = True,
) -> Run:
    """Run the same steps without Overspill: the baseline that a managed run must equal.

    The baseline is eager PyTorch. If the managed run has Inductor's kernels, it is `torch.compile` with that run's
    `partition`.
    """
    running = _running(job, options, steps, device, on_step, None, keep_state=keep_state)
    partitioned = {} if partition is None else {"activation_memory_budget": partition}
    try:
        with functorch_config.patch(partitioned):
            return _train(running, None, compiled=options.backend == "inductor")
    finally:
        reset_dynamo()


@dataclass(frozen=True)
class _Running:
    """A job that is being trained."""

    job: Job
    steps: int
    device: str
    on_step: Callable[[int, float], None] | None
    """Called after each step with its number and loss."""
    recorder: RunRecorder | None
    keep_state: bool


def _running(
    job: Job,
    options: Options,
    steps: int,
    device: str,
    on_step: Callable[[int, float], None] | None,
    recorder: RunRecorder | None,
    *,
    keep_state: bool,
) -> _Running:
    """Return the job to train with its settings. Raises RequestError if it cannot be trained."""
    job.check_trained(whole_step=options.whole_step)
    if steps < 1:
        raise RequestError(f"steps={steps} is not a positive number; give 1 or more")
    if torch.device(device).type == "cuda" and not accelerator.is_available():
        raise RequestError("this machine has no CUDA device; train with device=cpu")
    return _Running(job, steps, device, on_step, recorder, keep_state)


def _train(running: _Running, session: Session | None, *, compiled: bool) -> Run:
    job = running.job
    _leave_nothing(running.device)
    step, given = _made(running)
    optimizer = job.make_optimizer(step.parameters())
    model: Callable[..., Tensor] = step
    if session is not None:
        session.watch(step, optimizer)
        session.accumulates, session.clips = job.keeps_gradients, job.clips
        model = compile_in(session, step, fullgraph=True)
    elif compiled:
        model = torch.compile(step, fullgraph=True, dynamic=False)
    run = Run()
    there = [*step.parameters(), *step.buffers(), *given[0]]
    # What compiled kernels allocate no dispatch mode sees: it is counted in the last step, after all that compiling
    # takes.
    counts = compiled and torch.device(running.device).type == "cpu"
    with (
        nullcontext(nullcontext) if counts else _measured(running.device, session, there, run) as watching,
        _recorded(session, running.recorder, run),
    ):
        parts: list[tuple[Tensor, ...]] = []
        losses: list[Tensor] = []

        def loss_of(_: nn.Module, part: tuple[Tensor, ...]) -> Tensor:
            with watching() if session is None else nullcontext():
                loss = model(*part)
            losses.append(loss.detach())
            return loss

        steps = train_steps(job, step, optimizer, parts.__getitem__, loss_of, around=watching)

        def one_step(index: int) -> Tensor:
            parts[:] = batches.split(given[index % len(given)], job.accumulate)
            losses.clear()
            next(steps)
            first, *others = [loss / job.accumulate for loss in losses]
            return sum(others, first)

        @contextmanager
        def counted() -> Iterator[None]:
            optimizer.zero_grad(set_to_none=True)
            begun = LiveBytes(torch.device(running.device))
            begun.add([*there, *tree_leaves(list(optimizer.state.values()))])
            with allocations() as found:
                yield
            run.measured_peak_bytes = begun.live_bytes + peak_of(found.changes)[0]

        _run_steps(running, one_step, run, around_last=counted if counts else nullcontext)
    run.state = _final_state(step) if running.keep_state else {}
    return run


def _train_whole(running: _Running, options: Options) -> Run:
    job = running.job
    _leave_nothing(running.device)
    step, given = _made(running, lambda model: not _is_larger(model, running.device, options))
    optimizer = job.make_optimizer(step.parameters())
    there, where = next(step.parameters()).device, given[0][0].device
    whole = TrainStep(
        step.model, step.loss, (optimizer,), options, job.gradients, from_host_to=None if there == where else where
    )
    run, offloaded = Run(), [0]
    try:
        counts = options.backend == "inductor" and running.device == "cpu"
        with (
            nullcontext() if counts else _measured(running.device, whole, [*step.buffers(), *given[0]], run),
            _recorded(whole, running.recorder, run),
        ):

            def one_step(index: int) -> Tensor:
                loss = whole(*given[index % len(given)])
                offloaded.append(whole.engine.offloaded_bytes if whole.engine else 0)
                return loss

            @contextmanager
            def counted() -> Iterator[None]:
                with whole.counted(given[(running.steps - 1) % len(given)]) as found:
                    yield
                (run.measured_peak_bytes,) = found

            _run_steps(running, one_step, run, around_last=counted if counts else nullcontext)
        run.partition = whole.partitions[0]
        run.plan = next(plan for plan in whole.plans if any(op.phase is Phase.UPDATE for op in plan.graph.ops))
        run.planned_peak_bytes = whole.peak_bytes
        run.planned_reserved_bytes, run.planned_device_bytes = whole.reserved_bytes, whole.device_bytes
        run.offloaded_bytes = offloaded[-1] - offloaded[-2]
        run.times = whole.measured_times
        run.state = _final_state(step) if running.keep_state else {}
        return run
    finally:
        whole.close(bring_back=False)


def _run_steps(
    running: _Running,
    one_step: Callable[[int], Tensor],
    run: Run,
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    with drawing_from(SEED + 1):
        torch.cuda.manual_seed_all(SEED + 1)
        for index in range(running.steps):
            recorded = nullcontext() if running.recorder is None else running.recorder.step()
            with (
                attention_kernel(running.job),
                recorded,
                around_last() if index == running.steps - 1 else nullcontext(),
            ):
                begun = time.perf_counter()
                run.losses.append(one_step(index).item())
                run.step_seconds.append(time.perf_counter() - begun)
            if running.on_step is not None:
                running.on_step(index, run.losses[-1])


def _final_state(step: TrainingStep) -> dict[str, Tensor]:
    """Return weights and buffers in host memory; copies on a GPU would count in the next run's peak."""
    return {name: value.detach().to("cpu", copy=True) for name, value in step.state_dict().items()}


def _leave_nothing(device: str) -> None:
    """Free the memory that earlier runs left in cycles and in the allocator's cache, before a run is measured."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():
        gc.collect()
        accelerator.empty_cache(torch.device(device))


@contextmanager
def _measured(
    where: str, managed: Session | TrainStep | None, persistent: list[Tensor], run: Run
) -> Iterator[Callable[[], Any]]:
    """Measure the peak within the context: by counting storages on the CPU, by the allocator on CUDA."""
    device = torch.device(where)
    if device.type == "cuda":
        accelerator.reset_peaks(device)
        yield nullcontext
        run.measured_peak_bytes, run.reserved_peak_bytes = accelerator.peak_bytes(device)
        return
    tracker = LiveBytes(device)
    tracker.add(persistent)
    if managed is not None:
        managed.tracker = tracker
    yield lambda: tracker
    run.measured_peak_bytes = tracker.peak_bytes


@contextmanager
def _recorded(managed: Session | TrainStep | None, recorder: RunRecorder | None, run: Run) -> Iterator[None]:
    """Record `managed` by `recorder`, if any, within the context, and store the record in `run`."""
    if managed is None or recorder is None:
        yield
        return
    with recording(recorder, sources_of(managed)):
        yield
    run.record = recorder.record


def _is_larger(model: nn.Module, device: str, options: Options) -> bool:
    """Return whether the weights of `model` are more than the GPU can have within its budget."""
    where = torch.device(device)
    if where.type != "cuda":
        return False
    room = options.limit.nbytes or usable_bytes(where)
    return sum(p.nbytes for p in model.parameters()) > room - device_noun(where).context_bytes


def _made(
    running: _Running, moves: Callable[[nn.Module], bool] = lambda _: True
) -> tuple[TrainingStep, list[tuple[Tensor, ...]]]:
    """Return the model with its loss, and a batch for all steps, or one for each if they vary.

    They are on their device; the model only if it `moves`.
    """
    job, device = running.job, running.device
    if job.attention is not None:
        with FakeTensorMode(allow_non_fake_inputs=True), attention_kernel(job):
            prepared_step(job, load_device("cpu") if device == "cpu" else None)
    try:
        step, given = prepared_step(job, steps=running.steps)
        if device != "cpu":
            step = step.to(device) if moves(step) else step
            given = [tuple(t.to(device) for t in batch) for batch in given]
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise StoreError(
                f"the model and its batch alone do not fit in memory: {what}; take a smaller batch or model"
            ) from None
        raise
    return step, given
