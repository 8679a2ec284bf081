"""Training (`job/loop.py`) and inference that can be recorded.

They are the programs that a user would write, on `cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.capture.recording.repeated import repeated
from overspill.capture.virtual_gpu.record import record
from overspill.capture.virtual_gpu.values.real_values import forget, know_nonzero
from overspill.core.errors import RequestError
from overspill.job import Job
from overspill.job.loop import train_steps, update
from overspill.job.prepare import prepared_batch
from overspill.models import BuiltModel
from overspill.models.drawing import drawing_from
from overspill.models.inputs import tensors_in
from overspill.models.step import whole_dtype

from .training.compiled import compiled_step
from .training.generation import forward_of
from .training.host import host_bytes
from .training.optimizers import optimizer_of
from .training.pipeline import Stage
from .training.prepare import prepared, surroundings

ITERATIONS = 3  # optimizer state appears in the first step, gradients of the last one live through the second

Program = Callable[[Recorder], None]


def program_of(job: Job, *, iterations: int = ITERATIONS, compiled: bool = False, marks_end: bool = False) -> Program:
    """Return the loop that trains a job, or only runs it.

    With `compiled`, its step runs as under `torch.compile`. With `marks_end`, training begins a last, empty step.
    """
    if job.trains:
        return surroundings(_training(_Loop(job), iterations=iterations, compiled=compiled, marks_end=marks_end), job)
    return surroundings(_inference(_Loop(job), iterations=iterations, compiled=compiled), job)


def recorded(job: Job, capability: tuple[int, int], iterations: int, *, lines: bool) -> Recording:
    """Return the recording of a job; its third step is the second one again where it is known to repeat it."""
    by_name = job.optimizer is None or isinstance(job.optimizer, str)
    if job.trains and by_name and iterations == ITERATIONS and (job.parallel is None or job.parallel.kind != "pp"):
        two = record(program_of(job, iterations=2, marks_end=True), capability=capability, lines=lines)
        if (found := repeated(two)) is not None:
            return found
    return record(program_of(job, iterations=iterations), capability=capability, lines=lines)


class _Loop:
    """The parts of a job's loop: model, batches, loss, output. The model exists once it is built."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._built: BuiltModel | None = None

    def build(self) -> nn.Module:
        self._built = self.job.build()
        return self._built.module

    @property
    def built(self) -> BuiltModel:
        assert self._built is not None
        return self._built

    def make_inputs(self) -> Any:
        """Return a batch on the host, of which only integers have values; no other number is 0."""
        with drawing_from(0):
            made = self.built.make_batch(self.job.micro_batch(self.job.batch))  # type: ignore[arg-type]
        for tensor in tensors_in(made):
            if tensor.is_floating_point():
                forget(tensor)
                know_nonzero(tensor)
        return made

    def loss(self, module: nn.Module, inputs: Any) -> Tensor:
        return self.built.loss(module, *inputs)

    def output(self, module: nn.Module, inputs: Any) -> Any:
        """Return the module's output as the job's loss receives it; the rest of the loss does not run."""

        def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
            raise _Reached(output)

        return self._reached(module.register_forward_hook(stop), module, inputs)

    def arguments(self, module: nn.Module, inputs: Any) -> tuple[Any, Any]:
        """Return the arguments that the job's loss gives the module, by position and by keyword."""

        def stop(_module: nn.Module, args: Any, kwargs: Any) -> None:
            raise _Reached((args, kwargs))

        found: tuple[Any, Any] = self._reached(module.register_forward_pre_hook(stop, with_kwargs=True), module, inputs)
        return found

    def _reached(self, handle: RemovableHandle, module: nn.Module, inputs: Any) -> Any:
        try:
            self.loss(module, inputs)
        except _Reached as done:
            return done.value
        finally:
            handle.remove()
        raise RequestError(
            f"{self.built.name}: the loss never calls the module; compute it from what the module returns"
        )


class _Reached(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _training(loop: _Loop, *, iterations: int, compiled: bool, marks_end: bool) -> Program:
    """Return the loop of `zero_grad`, forward, loss, backward and `step`, with the job's settings.

    `amp` is `torch.autocast` in float16 with a GradScaler. With `compiled`, `torch.compile` has compiled the loss.
    """
    job, written = loop.job, None
    if compiled:
        job.check_compiled()
        written = compiled_step(loop.build, loop.make_inputs, loop.loss, whole_dtype(job.dtype))
    if job.parallel is not None and job.parallel.kind == "pp":
        return _pipeline(loop, iterations)

    def program(recorder: Recorder) -> None:
        # The model and its optimizer, on the device.
        value_of = loop.loss if written is None else written(recorder)
        module = prepared(loop.build().train(), job, recorder)
        optimizer = optimizer_of(job, module)
        recorder.host_bytes = host_bytes(job, module)
        scaler = torch.amp.GradScaler("cuda") if job.dtype == "amp" else None
        kept: list[Any] = []
        if job.keep_outputs:
            module.register_forward_hook(lambda _module, _inputs, output: kept.__setitem__(slice(None), [output]))

        def loss_of(module: nn.Module, inputs: Any) -> Tensor:
            with _autocast(job.dtype):
                return value_of(module, inputs)

        steps = train_steps(job, module, optimizer, lambda _: _batch(recorder, loop), loss_of, scaler)
        for _ in range(iterations):
            recorder.start_iteration()
            next(steps)
        if marks_end:
            recorder.start_iteration()

    return program


def _pipeline(loop: _Loop, iterations: int) -> Program:
    """Return the training loop of one stage of a pipeline, whose batches are micro-batches."""
    job, parallel = loop.job, loop.job.parallel
    assert parallel is not None

    def program(recorder: Recorder) -> None:
        module = prepared(loop.build().train(), job, recorder)
        # The stage's part of the model, on the device.
        stage = Stage(module, parallel, recorder, loop.loss)
        with recorder.fabricating():
            stage.to_device(loop.make_inputs())
        recorder.mark_module(module)
        optimizer = optimizer_of(job, module)
        scaler = torch.amp.GradScaler("cuda") if job.dtype == "amp" else None
        if scaler is not None:
            scaler.scale(torch.zeros((), device="cuda"))  # its first call makes the scale, and most stages have no loss
        for _ in range(iterations):
            recorder.start_iteration()
            if optimizer is not None:
                optimizer.zero_grad(job.set_to_none)
            with recorder.fabricating():
                # Only the first and the last stage read batches.
                inputs = [loop.make_inputs() for _ in range(parallel.pieces)]
            if stage.reads:
                inputs = prepared_batch(inputs, job, device="cuda")
            stage.step(inputs, partial(_autocast, job.dtype), scaler)
            update(job, module, optimizer, scaler)

    return program


def _inference(loop: _Loop, *, iterations: int, compiled: bool) -> Program:
    """Return the model without gradients; each output lives until the next one exists."""
    job, written = loop.job, None
    job.check_inference()
    if compiled:
        job.check_compiled()
        written = compiled_step(
            loop.build, loop.make_inputs, _call_with, whole_dtype(job.dtype), trains=False, arguments=loop.arguments
        )
    forward = forward_of(loop.arguments, job.generate) if job.generate else loop.output

    def program(recorder: Recorder) -> None:
        run = forward if written is None else written(recorder)
        module = prepared(loop.build().eval(), job, recorder)
        for _ in range(iterations):
            recorder.start_iteration()
            inputs = _batch(recorder, loop)
            with torch.no_grad(), _autocast(job.dtype):
                output = run(module, inputs)
        del output

    return program


def _call_with(module: nn.Module, arguments: Any) -> Any:
    args, kwargs = arguments
    return module(*args, **kwargs)


def _autocast(dtype: str) -> AbstractContextManager[Any]:
    if not dtype.startswith("amp"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16)


def _batch(recorder: Recorder, loop: _Loop) -> Any:
    with recorder.fabricating():
        made = loop.make_inputs()
    return prepared_batch(made, loop.job, device="cuda")
