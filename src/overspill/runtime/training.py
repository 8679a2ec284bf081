"""Training jobs: plan one without memory, or run it within a budget and prove the numbers."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from overspill.capture.compiled.elsewhere import captured_for
from overspill.capture.compiled.trace import trace
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core import Device, Graph, Phase
from overspill.core.errors import RequestError, StoreError, is_out_of_memory
from overspill.costs import MeasuredTimes, with_algorithms
from overspill.models import Job, check_optimizer, optimizer_named
from overspill.models.step import DTYPES, TrainingStep, job_in_dtype
from overspill.plans.plan import Plan

from . import accelerator, batches
from .compiled.compile import compile_in
from .compiled.session import Session
from .hardware import elsewhere
from .live.allocator import serving
from .live.pools import check_live, live_steps
from .live.steps import PoolReport
from .options import Options, budget_for, device_for, plan_graph
from .recording.attach import recording
from .recording.record import RunRecord
from .recording.recorder import Recorder
from .recording.sources import sources_of
from .step.train_step import GradientOptions, TrainStep
from .step.updates import as_on
from .surroundings import surroundings_of
from .tracker import LiveBytes

SEED = 0
PLAIN = GradientOptions()


@dataclass(frozen=True)
class Training:
    """What to train: `build` makes the job anew (weights and data follow from the seed), `device` is cpu or cuda.

    With `whole_step` the update is part of the plan, as in `overspill.train_step`; only then may `gradients` differ
    from the default. `dtype` is float32, bfloat16, float16, or amp-bfloat16 (autocast). `keep_state`: the run ends with a copy of weights and buffers, to compare with another's.
    """

    build: Callable[[], Job]
    batch: int
    optimizer: str = "sgd"
    steps: int = 3
    device: str = "cpu"
    whole_step: bool = False
    gradients: GradientOptions = PLAIN
    keep_state: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.batch < 1:
            raise RequestError(f"batch={self.batch} is not a positive number; give 1 or more")
        if self.steps < 1:
            raise RequestError(f"steps={self.steps} is not a positive number; give 1 or more")
        check_optimizer(self.optimizer)
        if self.dtype == "amp":
            raise RequestError(
                "amp scales the loss by a GradScaler, which is not planned; amp-bfloat16 takes the same bytes beside it"
            )
        if self.dtype not in DTYPES:
            raise RequestError(f"unknown dtype {self.dtype!r}; dtypes to train in: {', '.join(DTYPES)}")
        if not self.whole_step and self.gradients != PLAIN:
            raise RequestError("accumulation and clipping are planned with the whole step only; add whole_step=")
        if torch.device(self.device).type == "cuda" and not accelerator.is_available():
            raise RequestError("this machine has no CUDA device; train with device=cpu")

    @property
    def manner(self) -> str:
        """In which dtype, what is planned where it is the whole step, and what the step does to gradients, for a title."""
        parts = [] if self.dtype == "float32" else [f"in {self.dtype}"]
        if self.whole_step:
            parts.append("whole step")
        if self.gradients.accumulate > 1:
            parts.append(f"{self.gradients.accumulate} micro-batches")
        if self.gradients.clip_norm is not None:
            parts.append(f"gradients clipped to norm {self.gradients.clip_norm:g}")
        if self.gradients.clip_value is not None:
            parts.append(f"gradients clipped to ±{self.gradients.clip_value:g}")
        return "".join(f", {part}" for part in parts)


@dataclass
class Run:
    """What one run gave: the loss and seconds of each step, the measured peak, and the final weights and buffers.

    `partition` is the `activation_memory_budget` that Inductor's programs were parted by. `record` is what the run did when, if
    that was asked for. `planned_peak_bytes` are live
    bytes; on CUDA `planned_reserved_bytes` are what PyTorch's allocator takes for them, and `planned_device_bytes` that and
    the context: what the card must have.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    measured_peak_bytes: int = 0
    planned_peak_bytes: int = 0
    planned_reserved_bytes: int | None = None
    planned_device_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    partition: float | None = None
    offloaded_bytes: int = 0
    times: MeasuredTimes | None = None
    pool: PoolReport | None = None
    record: RunRecord | None = field(default=None, repr=False)

    def identical_to(self, other: Run) -> bool:
        """Whether losses and final state are equal to the last bit."""
        return (
            [struct.pack("d", loss) for loss in self.losses] == [struct.pack("d", loss) for loss in other.losses]
            and self.state.keys() == other.state.keys()
            and all(same_bits(value, other.state[name]) for name, value in self.state.items())
        )


def preview(training: Training, options: Options) -> Plan:
    """The plan of a job, made on fake tensors: no memory, no run. For a CPU it is the plan that the run would make.

    For a GPU convolutions have the menu of algorithms that policies may choose from, as in `graph_for`, and a budget is that of
    its card, as in training there. With Inductor's
    kernels, whose programs are written and not compiled, library calls have no workspaces (`plan_unrun`).
    """
    device = _device_of(options)
    by_inductor = options.backend == "inductor"
    if by_inductor or (training.whole_step and device.kind == "cpu"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            step, (batch, *_) = _prepare(training, "cpu")
            optimizer = optimizer_named(training.optimizer)(step.parameters())
            if not training.whole_step:
                from .compiled.unrun import plan_unrun  # noqa: PLC0415 - Inductor takes seconds to import

                return plan_unrun(step, batch, optimizer, options)
        with _nothing_compiled() if by_inductor else nullcontext():
            return TrainStep(step.model, step.loss, optimizer, options, training.gradients).preview(*batch)
    graph, device = graph_for(training, options)
    return plan_graph(options, graph, device, budget_for(options, graph, device, torch.device("cpu")))


def _nothing_compiled() -> AbstractContextManager[None]:
    from overspill.capture.programs.unrun import nothing_compiled  # noqa: PLC0415 - Inductor takes seconds to import

    return nothing_compiled()


def graph_for(training: Training, options: Options) -> tuple[Graph, Device]:
    """The Graph of one step of a job, and the device that any policy is to plan it for: that of `step_graph`, with menus on a GPU."""
    device = _device_of(options)
    with captured_for(device):
        graph = _captured(training, options.reserve, device.kind)
    return with_algorithms(graph, device) if device.kind == "cuda" else graph, device


def _device_of(options: Options) -> Device:
    """The device to plan for, which need not be here."""
    return elsewhere(device_for(options, torch.device("cpu")), options.software)


def step_graph(training: Training) -> Graph:
    """The Graph of one step of a job as PyTorch runs it, captured on fake tensors.

    Of several micro-batches it is that of the last, which has the update.
    """
    return _captured(training)


def _captured(training: Training, reserve: str | float | None = None, kind: str = "cpu") -> Graph:
    """The Graph of a step, captured on the CPU, whose update is as on a device of `kind`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        step, (batch, *_) = _prepare(training, "cpu")
        optimizer = optimizer_named(training.optimizer)(step.parameters())
        for group in optimizer.param_groups:
            group.update(as_on(torch.device(kind), group))
        if not training.whole_step:
            return trace(
                step,
                batch,
                lambda joint, here: surroundings_of(joint, here, step.parameters(), [optimizer], reserve),
            ).graph
    return TrainStep(step.model, step.loss, optimizer, Options(), training.gradients).graph(*batch)


def train(
    training: Training,
    options: Options,
    on_step: Callable[[int, float], None] | None = None,
    recorder: Recorder | None = None,
) -> Run:
    """Train within the budget. Raises what planning and the store raise; nothing is left in the store directory.

    `recorder`, whose steps are marked by hand, is told what the run does.
    """
    where = torch.device(training.device)
    has_pool = check_live(options.placement, options.backend, where)
    if training.whole_step:
        if has_pool and where.type == "cuda":  # before the model is on the GPU
            live_steps(str(options.placement), where)
        return _train_whole(training, options, on_step, recorder)
    session = Session(options)
    if where.type == "cuda":
        session.place_live(where)
    try:
        run = _train(training, session, on_step, recorder, compiled=options.backend == "inductor")
        run.plan = session.plans[0] if session.plans else None
        run.planned_peak_bytes = run.plan.peak_bytes if run.plan is not None else 0
        run.planned_reserved_bytes, run.planned_device_bytes = session.reserved_bytes, session.device_bytes
        run.partition = session.partitions[0] if session.plans else None
        run.offloaded_bytes = session.engine.offloaded_bytes // training.steps if session.engine else 0
        run.times = session.measured_times
        run.pool = session.pool
        return run
    finally:
        session.close()
        torch._dynamo.reset()  # Dynamo keeps what it compiled, and refuses the same class after some sessions


def train_plain(
    training: Training,
    options: Options,
    on_step: Callable[[int, float], None] | None = None,
    partition: float | None = None,
) -> Run:
    """The same steps without Overspill: the reference that a managed run must equal.

    That is eager PyTorch, or where the managed run has its kernels `torch.compile`, with that run's `partition`.
    """
    parted = {} if partition is None else {"activation_memory_budget": partition}
    try:
        with torch._functorch.config.patch(parted):
            return _train(training, None, on_step, None, compiled=options.backend == "inductor")
    finally:
        torch._dynamo.reset()


def _train(
    training: Training,
    session: Session | None,
    on_step: Callable[[int, float], None] | None,
    recorder: Recorder | None,
    *,
    compiled: bool,
) -> Run:
    _leave_nothing(training.device)
    step, given = _prepare(training, training.device)
    optimizer = optimizer_named(training.optimizer)(step.parameters())
    model: Callable[..., Tensor] = step
    if session is not None:
        session.watch(step, optimizer)
        model = compile_in(session, step, fullgraph=True)
    elif compiled:
        model = torch.compile(step, fullgraph=True, dynamic=False)
    run = Run()
    there = [*step.parameters(), *step.buffers(), *given[0]]
    # What compiled kernels allocate no dispatch mode sees: it is counted in the last step, after all that compiling takes.
    counts = compiled and torch.device(training.device).type == "cpu"
    with (
        nullcontext(nullcontext) if counts else _measured(training, session, there, run) as watching,
        _recorded(session, recorder, run),
    ):

        def one_step(index: int) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            total, share = None, training.gradients.accumulate
            for part in batches.split(given[index % len(given)], share):
                with watching() if session is None else nullcontext():
                    loss = model(*part)
                with watching():
                    loss = loss / share if share > 1 else loss
                    loss.backward()
                    total = loss.detach() if total is None else total + loss.detach()
            with watching():
                _clip(step.parameters(), training.gradients)
                optimizer.step()
            assert total is not None
            return total

        @contextmanager
        def counted() -> Iterator[None]:
            optimizer.zero_grad(set_to_none=True)
            begun = LiveBytes(torch.device(training.device))
            begun.add([*there, *tree_leaves(list(optimizer.state.values()))])
            with allocations() as found:
                yield
            run.measured_peak_bytes = begun.live_bytes + peak_of(found.changes)[0]

        _run_steps(
            training,
            one_step,
            run,
            on_step,
            recorder,
            around_last=counted if counts else nullcontext,
        )
    run.state = _final_state(step) if training.keep_state else {}
    return run


def _train_whole(
    training: Training,
    options: Options,
    on_step: Callable[[int, float], None] | None,
    recorder: Recorder | None,
) -> Run:
    _leave_nothing(training.device)
    step, given = _prepare(training, training.device)
    optimizer = optimizer_named(training.optimizer)(step.parameters())
    whole = TrainStep(step.model, step.loss, optimizer, options, training.gradients)
    run, offloaded = Run(), [0]
    try:
        counts = options.backend == "inductor" and training.device == "cpu"
        with (
            nullcontext() if counts else _measured(training, whole, [*step.buffers(), *given[0]], run),
            _recorded(whole, recorder, run),
        ):

            def one_step(index: int) -> Tensor:
                loss = whole(*given[index % len(given)])
                offloaded.append(whole.engine.offloaded_bytes if whole.engine else 0)
                return loss

            @contextmanager
            def counted() -> Iterator[None]:
                with whole.counted(given[(training.steps - 1) % len(given)]) as found:
                    yield
                (run.measured_peak_bytes,) = found

            _run_steps(training, one_step, run, on_step, recorder, around_last=counted if counts else nullcontext)
        run.partition = whole.partitions[0]
        run.plan = next(plan for plan in whole.plans if any(op.phase is Phase.UPDATE for op in plan.graph.ops))
        run.planned_peak_bytes = whole.peak_bytes
        run.planned_reserved_bytes, run.planned_device_bytes = whole.reserved_bytes, whole.device_bytes
        run.offloaded_bytes = offloaded[-1] - offloaded[-2]
        run.times = whole.measured_times
        run.pool = whole.pool
        run.state = _final_state(step) if training.keep_state else {}
        return run
    finally:
        whole.close(bring_back=False)


def _run_steps(
    training: Training,
    one_step: Callable[[int], Tensor],
    run: Run,
    on_step: Callable[[int, float], None] | None,
    recorder: Recorder | None,
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    torch.manual_seed(SEED + 1)
    for index in range(training.steps):
        recorded = nullcontext() if recorder is None else recorder.step()
        with recorded, around_last() if index == training.steps - 1 else nullcontext():
            begun = time.perf_counter()
            run.losses.append(one_step(index).item())
            run.step_seconds.append(time.perf_counter() - begun)
        if on_step is not None:
            on_step(index, run.losses[-1])


def _clip(parameters: Iterator[nn.Parameter], gradients: GradientOptions) -> None:
    """Clip as the user of plain PyTorch does, by norm first."""
    owned = list(parameters)
    if gradients.clip_norm is not None:
        nn.utils.clip_grad_norm_(owned, gradients.clip_norm)
    if gradients.clip_value is not None:
        nn.utils.clip_grad_value_(owned, gradients.clip_value)


def _final_state(step: TrainingStep) -> dict[str, Tensor]:
    """Weights and buffers, in host memory: copies on a GPU would be part of the next run's peak."""
    return {name: value.detach().to("cpu", copy=True) for name, value in step.state_dict().items()}


def _leave_nothing(device: str) -> None:
    """Before a run is measured: what runs before it have left in cycles and in the allocator's cache is given back."""
    if torch.device(device).type == "cuda" and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _measured(
    training: Training, managed: Session | TrainStep | None, persistent: list[Tensor], run: Run
) -> Iterator[Callable[[], Any]]:
    """Measure the peak of what runs inside: by counting storages on the CPU, by the allocator's own figures on CUDA."""
    device = torch.device(training.device)
    if device.type == "cuda" and (ours := serving()) is not None:
        yield nullcontext
        found = ours.statistics()
        run.measured_peak_bytes, run.reserved_peak_bytes = found.peak_allocated_bytes, found.peak_reserved_bytes
        return
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
def _recorded(managed: Session | TrainStep | None, recorder: Recorder | None, run: Run) -> Iterator[None]:
    """While this lasts `recorder`, if there is one, is told what `managed` does; `run` then has the record."""
    if managed is None or recorder is None:
        yield
        return
    with recording(recorder, sources_of(managed)):
        yield
    run.record = recorder.record


def _prepare(training: Training, device: str) -> tuple[TrainingStep, list[tuple[Tensor, ...]]]:
    """The model with its loss, and a batch for all steps, or where they vary one for each."""
    torch.manual_seed(SEED)
    try:
        job = job_in_dtype(training.build(), training.dtype)
        step = TrainingStep(job)
        given = [job.make_batch(training.batch) for _ in range(training.steps if job.varied else 1)]
        if device != "cpu":
            step, given = step.to(device), [tuple(t.to(device) for t in batch) for batch in given]
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise StoreError(
                f"the model and its batch alone do not fit in memory: {what}; take a smaller batch or model"
            ) from None
        raise
    return step, given


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes (unlike `==`, true for equal NaNs and false for 0.0 and -0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
