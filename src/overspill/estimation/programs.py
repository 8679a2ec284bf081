"""Training and inference loops as programs that can be recorded: what the user would write, on `cuda`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.models import Job
from overspill.models.step import loss_in, whole_dtype

from .recipe import Recipe
from .training.compiled import Call, compiled_step
from .training.generation import forward_of
from .training.host import host_bytes
from .training.optimizers import maker_of, optimizer_of
from .training.pipeline import Stage
from .training.prepare import on_device, prepared, surroundings

ITERATIONS = 3  # optimizer state appears in the first step, gradients of the last one live through the second

Program = Callable[[Recorder], None]


class _Reached(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def training(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    recipe: Recipe,
    *,
    iterations: int = ITERATIONS,
    compiled: bool = False,
) -> Program:
    """A training loop: `zero_grad`, forward, `loss(module, inputs)`, backward, `step`, as `recipe` has them.

    `amp` is `torch.autocast` in float16 with a GradScaler. With `compiled`, `torch.compile` has compiled `loss`.
    """
    written = None
    if compiled:
        recipe.check_compiled()
        written = compiled_step(build, make_inputs, loss, whole_dtype(recipe.dtype))
    if recipe.parallel is not None and recipe.parallel.kind == "pp":
        return surroundings(_pipeline(build, make_inputs, loss, recipe, iterations), recipe)

    def program(recorder: Recorder) -> None:
        value_of = loss if written is None else written(recorder)
        module = prepared(build().train(), recipe, recorder)
        optimizer = optimizer_of(recipe, module)
        if (make := maker_of(recipe)) is not None:
            recorder.host_bytes = host_bytes(recipe, module, make)
        scaler = torch.amp.GradScaler("cuda") if recipe.dtype == "amp" else None
        for _ in range(iterations):
            recorder.start_iteration()
            if optimizer is not None:
                optimizer.zero_grad(recipe.set_to_none)
            for _ in range(recipe.accumulate):
                inputs = _batch(recorder, make_inputs, recipe)
                with _autocast(recipe.dtype):
                    value = value_of(module, inputs)
                if scaler is not None:
                    value = scaler.scale(value)
                (value / recipe.accumulate if recipe.accumulate > 1 else value).backward()
            _update(module, optimizer, scaler, recipe)

    return surroundings(program, recipe)


def _pipeline(
    build: Callable[[], nn.Module], make_inputs: Callable[[], Any], loss: Callable[[nn.Module, Any], Tensor],
    recipe: Recipe, iterations: int,
) -> Program:  # fmt: skip
    """The training loop of one stage of a pipeline; `make_inputs` makes a micro-batch."""
    parallel = recipe.parallel
    assert parallel is not None

    def program(recorder: Recorder) -> None:
        module = prepared(build().train(), recipe, recorder)
        stage = Stage(module, parallel, recorder, loss)
        with recorder.fabricating():
            stage.to_device(make_inputs())
        recorder.mark_module(module)
        optimizer = optimizer_of(recipe, module)
        scaler = torch.amp.GradScaler("cuda") if recipe.dtype == "amp" else None
        if scaler is not None:
            scaler.scale(torch.zeros((), device="cuda"))  # its first call makes the scale, and most stages have no loss
        for _ in range(iterations):
            recorder.start_iteration()
            if optimizer is not None:
                optimizer.zero_grad(recipe.set_to_none)
            with recorder.fabricating():
                inputs = [make_inputs() for _ in range(parallel.pieces)]
            if stage.reads:
                inputs = on_device(inputs, recipe)
            stage.step(inputs, partial(_autocast, recipe.dtype), scaler)
            _update(module, optimizer, scaler, recipe)

    return program


def inference(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    forward: Callable[[nn.Module, Any], Any],
    recipe: Recipe,
    *,
    iterations: int = ITERATIONS,
    compiled: Call | None = None,
    arguments: Call = lambda _, inputs: inputs,
) -> Program:
    """A loop that runs the model without gradients; each output lives until the next one is there.

    `compiled` is what `torch.compile` compiles in place of `forward`, given what `arguments` makes of the inputs.
    """
    recipe.check_inference()
    written = None
    if compiled is not None:
        recipe.check_compiled()
        plain = whole_dtype(recipe.dtype)
        written = compiled_step(build, make_inputs, compiled, plain, trains=False, arguments=arguments)

    def program(recorder: Recorder) -> None:
        run = forward if written is None else written(recorder)
        module = prepared(build().eval(), recipe, recorder)
        for _ in range(iterations):
            recorder.start_iteration()
            inputs = _batch(recorder, make_inputs, recipe)
            with torch.no_grad(), _autocast(recipe.dtype):
                output = run(module, inputs)
        del output

    return surroundings(program, recipe)


def of_job(
    load: Callable[[], Job],
    batch: int,
    recipe: Recipe,
    *,
    iterations: int = ITERATIONS,
    compiled: bool = False,
) -> Program:
    """The loop that trains a job at a batch size (of each GPU); without an optimizer, that which only runs its model."""
    jobs: list[Job] = []

    def build() -> nn.Module:
        jobs[:] = [load()]
        return jobs[0].module

    def make_inputs() -> Any:
        return jobs[0].make_batch(recipe.micro_batch(batch))

    def loss(module: nn.Module, inputs: Any) -> Tensor:
        return jobs[0].loss(module, *inputs)

    def forward(module: nn.Module, inputs: Any) -> Any:
        return _output(jobs[0], module, inputs)

    def arguments(module: nn.Module, inputs: Any) -> Any:
        return _arguments(jobs[0], module, inputs)

    if recipe.optimizer is None:
        run = forward_of(arguments, recipe.generate) if recipe.generate else forward
        return inference(
            build, make_inputs, run, recipe, iterations=iterations, compiled=_call_with if compiled else None,
            arguments=arguments,
        )  # fmt: skip
    return training(build, make_inputs, loss, recipe, iterations=iterations, compiled=compiled)


def _output(job: Job, module: nn.Module, inputs: Any) -> Any:
    """What the module returns to the job's loss, which goes no further."""

    def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
        raise _Reached(output)

    return _reached(module.register_forward_hook(stop), job, module, inputs)


def _arguments(job: Job, module: nn.Module, inputs: Any) -> tuple[Any, Any]:
    """What the job's loss calls the module with: arguments by position and by keyword."""

    def stop(_module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached((args, kwargs))

    found: tuple[Any, Any] = _reached(module.register_forward_pre_hook(stop, with_kwargs=True), job, module, inputs)
    return found


def _reached(handle: RemovableHandle, job: Job, module: nn.Module, inputs: Any) -> Any:
    try:
        job.loss(module, *inputs)
    except _Reached as done:
        return done.value
    finally:
        handle.remove()
    raise RequestError(f"{job.name}: the loss never calls the module; compute it from what the module returns")


def _call_with(module: nn.Module, arguments: Any) -> Any:
    args, kwargs = arguments
    return module(*args, **kwargs)


def loss_of(output: Any) -> Tensor:
    """The scalar in a model's output: its `loss`, itself, or the sum of its first tensor."""
    found = loss_in(output)
    if found is None:
        found = output[0] if isinstance(output, (list, tuple)) else output
    if not isinstance(found, Tensor):
        raise RequestError(f"the model returns {type(output).__name__}, which holds no loss; pass loss=")
    return found if found.dim() == 0 else found.float().mean()


def _update(
    module: nn.Module, optimizer: Optimizer | None, scaler: torch.amp.GradScaler | None, recipe: Recipe
) -> None:
    """The end of a step: the optimizer's, through the scaler where there is one; without an optimizer gradients go."""
    if optimizer is None:
        module.zero_grad(recipe.set_to_none)
    elif scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _autocast(dtype: str) -> AbstractContextManager[Any]:
    if not dtype.startswith("amp"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16)


def _batch(recorder: Recorder, make_inputs: Callable[[], Any], recipe: Recipe) -> Any:
    with recorder.fabricating():
        made = make_inputs()
    return on_device(made, recipe)
