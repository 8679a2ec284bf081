"""`overspill estimate`: how much device memory a job takes, before it runs and without the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill import models
from overspill.core.budget import Budget
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.estimation.parallel import parallel_of

from .common import (
    AsJson,
    ImageSize,
    ModelChoice,
    OptimizerName,
    Outcome,
    SeqLen,
    Small,
    check_writable,
    narrate,
    quiet_torch,
)

if TYPE_CHECKING:
    from overspill.core import Device
    from overspill.estimation import Estimate
    from overspill.estimation.figures import Figures
    from overspill.plans.plan import Plan

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `overspill models` lists, decoder:width=…,depth=…, hf:config.json, or package.module:callable; with "
        "--script, the script's arguments.",
        show_default=False,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in a step.", show_default=False)]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="float32, bfloat16, float16, amp (autocast in float16) or amp-bfloat16."),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Does it fit there? A name that `overspill devices` lists, or a device file.",
        show_default=False,
    ),
]
AllocatorName = Annotated[
    str,
    typer.Option(metavar="NAME", help="pytorch, tensorflow, mxnet, chainer, cnmem, gtbm, chunked, best-fit or buddy."),
]
AllocatorConfig = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="As PYTORCH_CUDA_ALLOC_CONF, for instance expandable_segments:True.  [default: that variable]",
        show_default=False,
    ),
]
Inference = Annotated[bool, typer.Option("--inference", help="Run the model without gradients instead of training it.")]
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
Gpus = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="GPUs that train together; --batch is of each.", show_default=False),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--parallel", metavar="NAME", help="ddp, fsdp or horovod.  [default: ddp with --gpus]", show_default=False
    ),
]
SnapshotFile = Annotated[
    Path | None,
    typer.Option(
        "--snapshot", metavar="FILE", help="Save the simulated run for PyTorch's memory_viz.", show_default=False
    ),
]

Compiled = Annotated[
    bool, typer.Option("--compiled", help="Say too what the job takes under torch.compile; nothing is compiled for it.")
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


def estimate(
    words: Words = None,
    batch: Batch = None,
    optimizer: OptimizerName = "sgd",
    dtype: Dtype = "float32",
    gpu: Gpu = None,
    inference: Inference = False,
    script: Script = None,
    iterations: Iterations = 3,
    time_limit: TimeLimit = 600.0,
    allow_writes: AllowWrites = False,
    allocator: AllocatorName = "pytorch",
    allocator_config: AllocatorConfig = None,
    small: Small = False,
    image_size: ImageSize = None,
    seq_len: SeqLen = None,
    gpus: Gpus = None,
    parallel: Kind = None,
    snapshot: SnapshotFile = None,
    compiled: Compiled = False,
    budget: Within = None,
    json: AsJson = False,
) -> Outcome:
    """Estimate the memory of training a model, or of a script: does it fit, what takes the space, what would fit."""
    check_writable(snapshot)
    models.check_optimizer(optimizer)
    together = parallel_of(parallel, gpus)
    limit = _budget(budget, compiled=compiled, inference=inference)
    if compiled and script is not None:
        raise RequestError("--compiled is a model's; in a script torch.compile is left out")
    if script is None:
        model = _one_model(words)
        if batch is None:
            raise RequestError("say how many samples make a step, for instance --batch 32")
        models.check_name(model)
    elif together is not None or inference or small or any(size is not None for size in (batch, image_size, seq_len)):
        raise RequestError(
            "--batch, --small, --image-size, --seq-len, --inference, --gpus and --parallel are a model's; a script has its own"
        )
    if script is not None:
        from overspill.estimation.script_process import client

        client.start()  # it gets ready while this process does
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import DEFAULT_DEVICE, Setting, of_job, of_recording
        from overspill.estimation.script import record_script

        request: dict[str, Any] = {}
        within = None
        setting = Setting.of(gpu or DEFAULT_DEVICE, allocator, allocator_config)
        if script is not None:
            narrator.be_still()  # the terminal is the script's
            narrator.line(f"running {script} for {iterations} steps on a GPU that is not there")
            run = record_script(
                script, words or (), iterations=iterations, capability=setting.capability,
                memory_bytes=setting.device.memory_bytes, output_to_stderr=json, time_limit=time_limit,
                allow_writes=allow_writes,
            )  # fmt: skip
            made = of_recording(run.recording, run.name, setting)
            for note in run.notes:
                narrator.line(f"note: {note}")
            request |= {"model": str(script), "batch": None, "optimizer": ", ".join(run.optimizers) or None}
            request |= {"dtype": None, "iterations": run.iterations, "trains": run.trains, "notes": list(run.notes)}
        else:
            narrator.now(f"tracing {model}")
            choice = ModelChoice(model, small, image_size, seq_len)
            make_optimizer = None if inference else models.optimizer_named(optimizer)
            made = of_job(
                choice.build, model, batch or 1, make_optimizer, setting, dtype=dtype, parallel=together,
                compiled=compiled,
            )  # fmt: skip
            if limit is not None:
                narrator.now(f"planning {model} as torch.compile has it")
                within = _plan(choice, batch or 1, optimizer, dtype, limit, setting.device)
            request |= {"model": model, "batch": batch, "optimizer": None if inference else optimizer, "dtype": dtype}
        request |= {
            "gpus": 1 if together is None else together.gpus,
            "parallel": None if together is None else together.kind,
        }
        answer = _answer(request, made, gpu=None if gpu is None else setting.device.name, within=within)
        if snapshot is not None:
            made.save_snapshot(snapshot)
            narrator.line(f"saved {snapshot}: open it at https://pytorch.org/memory_viz")
    from overspill.report.estimate import estimate_report

    fits = (made if made.compiled is None else made.compiled).fits() or gpu is None
    return Outcome(
        answer,
        estimate_report(made, asked=gpu is not None, within=within),
        exit_code=0 if fits and not isinstance(within, InfeasibleBudget) else 1,
    )


def _budget(text: str | None, *, compiled: bool, inference: bool) -> Budget | None:
    """The budget of the compiled step. Raises RequestError where there is no such step."""
    if text is None:
        return None
    if not compiled:
        raise RequestError("--budget is for --compiled; `overspill plan` plans the eager step within a budget")
    if inference:
        raise RequestError("--budget is for training; leave out --inference")
    return Budget.parse(text)


def _plan(
    choice: ModelChoice, batch: int, optimizer: str, dtype: str, limit: Budget, device: Device
) -> Plan | InfeasibleBudget:
    """The plan of the compiled step within `limit` on `device`, or why there is none."""
    from overspill.estimation.programs import checked_dtype
    from overspill.models.step import job_in_dtype
    from overspill.runtime.options import Options
    from overspill.runtime.training import Training, preview

    training = Training(partial(job_in_dtype, choice.build, checked_dtype(dtype)), batch, optimizer)
    try:
        return preview(training, Options(limit, device=device, backend="inductor"))
    except InfeasibleBudget as error:
        return error


def _one_model(words: list[str] | None) -> str:
    if not words:
        raise RequestError("name a model (`overspill models` lists them), or a script with --script")
    if len(words) > 1:
        raise RequestError(f"one model at a time, not {' '.join(words)}")
    return words[0]


def _answer(
    request: dict[str, Any], made: Estimate, gpu: str | None, within: Plan | InfeasibleBudget | None
) -> dict[str, Any]:
    """What `--json` prints; what only a GPU can answer is null without one."""
    peak = made.peak
    asked = gpu is not None
    return request | {
        "gpu": gpu,
        "allocator": made.allocator,
        **_bytes_of(made),
        "capacity_bytes": made.device.memory_bytes if asked else None,
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "by_layer": dict(list(made.by_layer.items())[:20]),
        "peak": {
            "step": peak.iteration, "phase": peak.phase.value, "layer": peak.layer, "op": peak.op,
            "around": list(peak.ops),
        },
        "largest_batch": made.largest_batch if asked else None,
        "fitting_gpus": list(made.gpus),
        "changes": [
            {"what": change.what, "minimum_capacity_bytes": change.minimum_capacity_bytes, "fits": change.fits}
            for change in (made.changes if asked else ())
        ],
        "compiled": None if made.compiled is None else _compiled(made.compiled, within, asked=asked),
        "seconds": made.seconds,
    }  # fmt: skip


def _bytes_of(made: Figures) -> dict[str, int]:
    """What `--json` prints of the bytes that a job takes, eager or compiled."""
    return {
        "peak_requested_bytes": made.peak_requested_bytes,
        "peak_allocated_bytes": made.peak_allocated_bytes,
        "peak_reserved_bytes": made.peak_reserved_bytes,
        "context_bytes": made.context_bytes,
        "total_bytes": made.total_bytes,
        "total_low_bytes": made.total.low,
        "total_high_bytes": made.total.high,
    }


def _compiled(made: Figures, within: Plan | InfeasibleBudget | None, *, asked: bool) -> dict[str, Any]:
    """What `--json` prints of the job under torch.compile, and of its step within a budget."""
    return {
        "program": "cpu",
        **_bytes_of(made),
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "within": None if within is None else _within(within),
    }


def _within(plan: Plan | InfeasibleBudget) -> dict[str, Any]:
    if isinstance(plan, InfeasibleBudget):
        return {
            "feasible": False, "budget_bytes": plan.budget_bytes, "floor_bytes": plan.floor_bytes, "cause": plan.cause,
            "peak_bytes": None, "unmanaged_peak_bytes": None, "step_seconds": None, "slowdown": None,
        }  # fmt: skip
    return {
        "feasible": True, "budget_bytes": plan.budget_bytes, "floor_bytes": None, "cause": None,
        "peak_bytes": plan.peak_bytes, "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
        "step_seconds": plan.step_seconds, "slowdown": plan.slowdown,
    }  # fmt: skip
