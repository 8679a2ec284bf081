"""`overspill estimate`: how much device memory a job takes, before it runs and without the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill import models
from overspill.core.budget import Budget
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.estimation.recipe import Recipe
from overspill.estimation.source import Source

from . import complete
from .common import (
    AsJson,
    ImageSize,
    ModelChoice,
    Narrator,
    Outcome,
    ReportFile,
    SeqLen,
    Small,
    check_report,
    check_writable,
    narrate,
    quiet_torch,
)
from .recipe import check_as_it_is, with_recipe
from .software import Cuda, Torch

if TYPE_CHECKING:
    from overspill.core import Device
    from overspill.estimation import Estimate
    from overspill.estimation.api import Setting
    from overspill.plans.plan import Plan

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `overspill models` lists, decoder:width=…,depth=…, hf:config.json, or package.module:callable; with "
        "--script, the script's arguments.",
        show_default=False,
        autocompletion=complete.model,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in a step.", show_default=False)]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Does it fit there? A name that `overspill devices` lists, or a device file.",
        show_default=False,
        autocompletion=complete.device,
    ),
]
AllocatorName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="pytorch, tensorflow, mxnet, chainer, cnmem, gtbm, chunked, best-fit or buddy.  [default: the framework's own]",
        show_default=False,
        autocompletion=complete.allocator,
    ),
]
AllocatorConfig = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="As PYTORCH_CUDA_ALLOC_CONF, for instance expandable_segments:True.  [default: that variable]",
        show_default=False,
    ),
]
Script = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="An unmodified training script, run with `cuda` redirected; its arguments after `--`.",
        show_default=False,
    ),
]  # fmt: skip
AllowWrites = Annotated[
    bool,
    typer.Option("--allow-writes", help="Let the script change real files; otherwise its changes are thrown away."),
]
TimeLimit = Annotated[
    float, typer.Option(metavar="SECONDS", help="When the script is ended, with an answer if it has trained by then.")
]
Iterations = Annotated[int, typer.Option(min=1, metavar="N", help="Steps of the script to run.")]
SnapshotFile = Annotated[
    Path | None,
    typer.Option(
        "--snapshot", metavar="FILE", help="Save the simulated run for PyTorch's memory_viz.", show_default=False
    ),
]

Compiled = Annotated[
    bool, typer.Option("--compiled", help="Say too what the job takes under torch.compile; nothing is compiled for it.")
]
MxnetFile = Annotated[
    Path | None,
    typer.Option("--mxnet", metavar="FILE", help="A symbol file of MXNet, as MXNet trains it.", show_default=False),
]
TensorflowCallable = Annotated[
    str | None,
    typer.Option(
        "--tensorflow",
        metavar="MODULE:CALLABLE",
        help="A function of yours that returns a Keras model, or a step and the tf.TensorSpecs of its arguments.",
        show_default=False,
    ),
]
OnnxFile = Annotated[
    Path | None,
    typer.Option("--onnx", metavar="FILE", help="A model of ONNX, run and trained as MXNet would.", show_default=False),
]
InputShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=SHAPE",
        help="The shape of an input of --mxnet or --onnx, N being the batch, as data=N,3,224,224. Can be given again.",
        show_default=False,
    ),
]
Within = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="With --compiled: does the compiled step train within 8GiB, say, or 60% of its peak, and how fast?",
        show_default=False,
    ),
]
_NO_BATCH = "say how many samples make a step, for instance --batch 32"


@with_recipe()
def estimate(
    words: Words = None,
    *,
    batch: Batch = None,
    gpu: Gpu = None,
    script: Script = None,
    iterations: Iterations = 3,
    time_limit: TimeLimit = 600.0,
    allow_writes: AllowWrites = False,
    mxnet: MxnetFile = None,
    tensorflow: TensorflowCallable = None,
    onnx: OnnxFile = None,
    shapes: InputShapes = None,
    allocator: AllocatorName = None,
    allocator_config: AllocatorConfig = None,
    small: Small = False,
    image_size: ImageSize = None,
    seq_len: SeqLen = None,
    recipe: Recipe,
    torch: Torch = None,
    cuda: Cuda = None,
    snapshot: SnapshotFile = None,
    report: ReportFile = None,
    compiled: Compiled = False,
    budget: Within = None,
    json: AsJson = False,
) -> Outcome:
    """Estimate the memory of training a model, or of a script: does it fit, what takes the space, what would fit."""
    check_writable(snapshot, ".pickle")
    check_report(report)
    limit = _budget(budget, recipe, compiled=compiled)
    source = Source.of({"mxnet": mxnet, "tensorflow": tensorflow, "onnx": onnx}, shapes or ())
    if compiled and script is not None:
        raise RequestError(
            "--compiled is a model's, and in a script torch.compile is left out; leave --compiled or --script out"
        )
    if source is not None:
        others = (words, script, small, image_size, seq_len, recipe.parallel, compiled)
        _check_source(source, batch, recipe, others=others)
    elif script is None:
        _check_model(words, batch)
    elif (
        recipe.parallel is not None
        or recipe.optimizer is None
        or small
        or any(size is not None for size in (batch, image_size, seq_len))
    ):
        raise RequestError(
            "--batch, --small, --image-size, --seq-len, --inference, --gpus and --parallel are a model's, and a script has its own; leave them out"
        )
    if script is not None:
        check_as_it_is(recipe, "a script has its own way to train")
        from overspill.estimation.script_process import client

        client.start()  # it gets ready while this process does
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import DEFAULT_DEVICE, Setting
        from overspill.report.estimate import estimate_answer, estimate_report

        own = "pytorch" if source is None else source.allocator
        setting = Setting.of(gpu or DEFAULT_DEVICE, allocator or own, allocator_config, torch, cuda)
        within = None
        if source is not None:
            made, request = _of_source(source, batch or 1, recipe, setting, narrator)
        elif script is not None:
            run = _Run(script, words or [], iterations, time_limit, allow_writes, quiet=json)
            made, request = _of_script(run, setting, narrator)
        else:
            choice = ModelChoice(_one_model(words), small, image_size, seq_len)
            made, request = _of_model(choice, batch or 1, recipe, setting, narrator, compiled=compiled)
            if limit is not None:
                narrator.now(f"planning {choice.name} as torch.compile has it")
                within = _plan(choice, batch or 1, recipe, limit, setting.device)
        request |= {
            "gpus": 1 if recipe.parallel is None else recipe.parallel.gpus,
            "parallel": None if recipe.parallel is None else recipe.parallel.kind,
            "micro_batches": None
            if recipe.parallel is None or recipe.parallel.kind != "pp"
            else recipe.parallel.pieces,
            "ways": {name: getattr(recipe, name) for name in recipe.ways()},
        }
        answer = estimate_answer(request, made, gpu=None if gpu is None else setting.device.name, within=within)
        _save(made, snapshot, report, narrator, asked=gpu is not None)

    fits = (made if made.compiled is None else made.compiled).fits() or gpu is None
    return Outcome(
        answer,
        estimate_report(made, asked=gpu is not None, within=within),
        exit_code=0 if fits and not isinstance(within, InfeasibleBudget) else 1,
    )


def _save(made: Estimate, snapshot: Path | None, report: Path | None, narrator: Narrator, *, asked: bool) -> None:
    """Write the files that were asked for."""
    if snapshot is not None:
        made.save_snapshot(snapshot)
        narrator.line(f"saved {snapshot}: open it at https://pytorch.org/memory_viz")
    if report is not None:
        from overspill.report.page import write_page
        from overspill.report.pages.estimate import estimate_page

        write_page(report, estimate_page(made, asked=asked))
        narrator.line(f"saved {report}")


@dataclass(frozen=True)
class _Run:
    """How a script is run."""

    script: Path
    arguments: list[str]
    iterations: int
    time_limit: float
    allow_writes: bool
    quiet: bool


_Made = tuple["Estimate", dict[str, Any]]


def _of_source(source: Source, batch: int, recipe: Recipe, setting: Setting, narrator: Narrator) -> _Made:
    """The estimate of a job of another framework, and what was asked for."""
    from overspill.estimation.frameworks import of_source

    narrator.now(f"reading {source.target}")
    optimizer = None if recipe.optimizer is None else str(recipe.optimizer)
    made = of_source(source, batch, optimizer, setting)
    return made, {"model": source.target, "batch": batch, "optimizer": optimizer, "dtype": "float32"}


def _of_script(run: _Run, setting: Setting, narrator: Narrator) -> _Made:
    """The estimate of a script, and what it did."""
    from overspill.estimation.api import of_recording
    from overspill.estimation.script import record_script

    started = time.perf_counter()
    narrator.be_still()  # the terminal is the script's
    narrator.line(f"running {run.script} for {run.iterations} steps on a GPU that is not there")
    done = record_script(
        run.script, run.arguments, iterations=run.iterations, capability=setting.capability,
        memory_bytes=setting.device.memory_bytes, output_to_stderr=run.quiet, time_limit=run.time_limit,
        allow_writes=run.allow_writes, tell=lambda text: narrator.line(f"note: {text}"),
    )  # fmt: skip
    for note in done.notes:
        narrator.line(f"note: {note}")
    request: dict[str, Any] = {
        "model": str(run.script),
        "batch": None,
        "optimizer": ", ".join(done.optimizers) or None,
        "dtype": None,
    }
    request |= {"iterations": done.iterations, "trains": done.trains, "notes": list(done.notes)}
    made = of_recording(done.recording, done.name, setting)
    return replace(made, seconds=time.perf_counter() - started), request


def _of_model(
    choice: ModelChoice, batch: int, recipe: Recipe, setting: Setting, narrator: Narrator, *, compiled: bool
) -> _Made:
    """The estimate of a model, and what was asked for."""
    from overspill.estimation.api import of_job

    narrator.now(f"tracing {choice.name}")
    made = of_job(choice.build, choice.name, batch, recipe, setting, compiled=compiled)
    return made, {"model": choice.name, "batch": batch, "optimizer": recipe.optimizer, "dtype": recipe.dtype}


def _budget(text: str | None, recipe: Recipe, *, compiled: bool) -> Budget | None:
    """The budget of the compiled step. Raises RequestError where there is no such step."""
    if text is None:
        return None
    if not compiled:
        raise RequestError("--budget is for --compiled; `overspill plan` plans the eager step within a budget")
    if recipe.optimizer is None:
        raise RequestError("--budget is for training; leave out --inference")
    check_as_it_is(recipe, "what --budget plans is a plain step")
    models.check_optimizer(str(recipe.optimizer))
    return Budget.parse(text)


def _plan(choice: ModelChoice, batch: int, recipe: Recipe, limit: Budget, device: Device) -> Plan | InfeasibleBudget:
    """The plan of the compiled step within `limit` on `device`, or why there is none."""
    from overspill.runtime.options import Options
    from overspill.runtime.training import Training, preview

    training = Training(choice.build, batch, str(recipe.optimizer), dtype=recipe.dtype)
    try:
        return preview(training, Options(limit, device=device, backend="inductor"))
    except InfeasibleBudget as error:
        return error


def _check_source(source: Source, batch: int | None, recipe: Recipe, others: tuple[object, ...]) -> None:
    """Raise RequestError where a job of another framework was asked for together with what it does not have."""
    if any(others):
        raise RequestError(
            f"--{source.framework} is a job of its own: leave out MODEL, --script, --small, --image-size, --seq-len, "
            "--gpus, --parallel and --compiled"
        )
    check_as_it_is(recipe, f"--{source.framework} is trained as its framework does")
    if recipe.dtype != "float32":
        raise RequestError(f"--{source.framework} is read as float32; --dtype is for PyTorch's models")
    if batch is None:
        raise RequestError(_NO_BATCH)


def _check_model(words: list[str] | None, batch: int | None) -> None:
    """Raise RequestError where no model was named, or no batch."""
    model = _one_model(words)
    if batch is None:
        raise RequestError(_NO_BATCH)
    models.check_name(model)


def _one_model(words: list[str] | None) -> str:
    if not words:
        raise RequestError("name a model (`overspill models` lists them), or a script with --script")
    if len(words) > 1:
        raise RequestError(f"one model at a time, not {' '.join(words)}; name one, and options with -- before them")
    return words[0]
