"""Training and inference loops as programs that can be recorded: what the user would write, on `cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.models import Job
from overspill.models.step import loss_in

from .compiled import Call, compiled_step
from .parallel import Parallel
from .wrappers import data_parallel

ITERATIONS = 3  # optimizer state appears in the first step, gradients of the last one live through the second
DTYPES = ("float32", "bfloat16", "float16", "amp", "amp-bfloat16")

Program = Callable[[Recorder], None]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class _Reached(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def training(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    make_optimizer: MakeOptimizer | None,
    *,
    dtype: str = "float32",
    iterations: int = ITERATIONS,
    accumulate: int = 1,
    parallel: Parallel | None = None,
    compiled: bool = False,
) -> Program:
    """A training loop: `zero_grad`, forward, `loss(module, inputs)`, backward, `step`.

    `amp` is `torch.autocast` in float16 with a GradScaler. With `accumulate`, that many micro-batches make a step.
    With `parallel`, it is the loop of one of several GPUs. With `compiled`, `torch.compile` has compiled `loss`.
    """
    plain = checked_dtype(dtype)
    written = None
    if compiled:
        _check_compiled(dtype, parallel)
        written = compiled_step(build, make_inputs, loss, plain)

    def program(recorder: Recorder) -> None:
        value_of = loss if written is None else written(recorder)
        if parallel is None:
            module = build().to("cuda", plain).train()
        else:
            built = build().train()
            module = data_parallel(built if plain is None else built.to(plain), parallel, recorder)
        recorder.mark_module(module)
        optimizer = make_optimizer(module.parameters()) if make_optimizer is not None else None
        scaler = torch.amp.GradScaler("cuda") if dtype == "amp" else None
        for _ in range(iterations):
            recorder.start_iteration()
            if optimizer is not None:
                optimizer.zero_grad()
            for _ in range(accumulate):
                inputs = _batch(recorder, make_inputs, plain)
                with _autocast(dtype):
                    value = value_of(module, inputs)
                if scaler is not None:
                    value = scaler.scale(value)
                (value / accumulate if accumulate > 1 else value).backward()
            if optimizer is not None and scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif optimizer is not None:
                optimizer.step()
            else:
                module.zero_grad()

    return program


def inference(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    forward: Callable[[nn.Module, Any], Any],
    *,
    dtype: str = "float32",
    iterations: int = ITERATIONS,
    compiled: Call | None = None,
    arguments: Call = lambda _, inputs: inputs,
) -> Program:
    """A loop that runs the model without gradients; each output lives until the next one is there.

    `compiled` is what `torch.compile` compiles in place of `forward`, given what `arguments` makes of the inputs.
    """
    plain = checked_dtype(dtype)
    written = None
    if compiled is not None:
        _check_compiled(dtype, None)
        written = compiled_step(build, make_inputs, compiled, plain, trains=False, arguments=arguments)

    def program(recorder: Recorder) -> None:
        run = forward if written is None else written(recorder)
        module = build().to("cuda", plain).eval()
        recorder.mark_module(module)
        for _ in range(iterations):
            recorder.start_iteration()
            inputs = _batch(recorder, make_inputs, plain)
            with torch.no_grad(), _autocast(dtype):
                output = run(module, inputs)
        del output

    return program


def of_job(
    load: Callable[[], Job],
    batch: int,
    make_optimizer: MakeOptimizer | None,
    *,
    dtype: str,
    iterations: int = ITERATIONS,
    parallel: Parallel | None = None,
    compiled: bool = False,
) -> Program:
    """The loop that trains a job at a batch size (of each GPU); without an optimizer, that which only runs its model.

    Raises RequestError for inference on several GPUs.
    """
    if parallel is not None and make_optimizer is None:
        raise RequestError(f"{parallel.kind} is for training; pass an optimizer, or estimate inference on one GPU")
    jobs: list[Job] = []

    def build() -> nn.Module:
        jobs[:] = [load()]
        return jobs[0].module

    def make_inputs() -> Any:
        return jobs[0].make_batch(batch)

    def loss(module: nn.Module, inputs: Any) -> Tensor:
        return jobs[0].loss(module, *inputs)

    def forward(module: nn.Module, inputs: Any) -> Any:
        return _output(jobs[0], module, inputs)

    def arguments(module: nn.Module, inputs: Any) -> Any:
        return _arguments(jobs[0], module, inputs)

    if make_optimizer is None:
        return inference(
            build, make_inputs, forward, dtype=dtype, iterations=iterations,
            compiled=_call_with if compiled else None, arguments=arguments,
        )  # fmt: skip
    return training(
        build, make_inputs, loss, make_optimizer, dtype=dtype, iterations=iterations, parallel=parallel,
        compiled=compiled,
    )  # fmt: skip


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
    raise RequestError(f"{job.name}: the loss never calls the module")


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


def _check_compiled(dtype: str, parallel: Parallel | None) -> None:
    """Raise RequestError for what is only estimated of eager PyTorch."""
    if parallel is not None:
        raise RequestError(
            f"a compiled step is estimated on one GPU, not with {parallel.kind}; leave one of the two out"
        )
    if dtype.startswith("amp"):
        raise RequestError(f"a compiled step is estimated in float32, bfloat16 or float16, not with autocast ({dtype})")


def checked_dtype(dtype: str) -> torch.dtype | None:
    """What the whole model is converted to; None where its weights stay as they are. Raises RequestError."""
    if dtype not in DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}; dtypes: {', '.join(DTYPES)}")
    return None if dtype == "float32" or dtype.startswith("amp") else getattr(torch, dtype)


def _autocast(dtype: str) -> AbstractContextManager[Any]:
    if not dtype.startswith("amp"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16)


def _batch(recorder: Recorder, make_inputs: Callable[[], Any], dtype: torch.dtype | None) -> Any:
    with recorder.fabricating():
        made = make_inputs()
    return _on_device(made, dtype)


def _on_device(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with every tensor on the device, floating ones in `dtype`."""
    if isinstance(value, Tensor):
        return value.to("cuda", dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {name: _on_device(item, dtype) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_on_device(item, dtype) for item in value])
    return value
