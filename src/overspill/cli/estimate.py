"""`overspill estimate`: a job's device memory, before it runs and without the device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.budget import Budget
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.units import format_apart
from overspill.job import Job, Script
from overspill.job.source import Source

from . import complete
from .common import (
    AsJson,
    DiskBandwidth,
    HostBudget,
    Narrator,
    Outcome,
    ReportFile,
    StoreName,
    check_report,
    check_writable,
    narrate,
    of_page,
    optional,
    quiet_torch,
    same_job,
)
from .job import with_job
from .software import Cuda, Torch

if TYPE_CHECKING:
    from overspill.core import Device
    from overspill.estimation import Estimate
    from overspill.estimation.api import Setting
    from overspill.plans.plan import Plan
    from overspill.report.page import PasteLine

Gpu = Annotated[
    str | None,
    optional(
        "NAME",
        "Does it fit there? A name that `overspill devices` lists, or a device file.",
        autocompletion=complete.device,
    ),
]
AllocatorName = Annotated[
    str | None,
    optional(
        "NAME",
        "pytorch, planned, chunked, gtbm, tensorflow, mxnet, chainer, cnmem, best-fit or buddy."
        "  [default: the framework's own]",
        autocompletion=complete.allocator,
    ),
]
AllocatorConfig = Annotated[
    str | None,
    optional("TEXT", "As PYTORCH_CUDA_ALLOC_CONF, for instance expandable_segments:True.  [default: that variable]"),
]
SnapshotFile = Annotated[
    Path | None, optional("FILE", "Save the simulated run for PyTorch's memory_viz.", "--snapshot")
]

Compiled = Annotated[
    bool, typer.Option("--compiled", help="Say too what the job takes under torch.compile; nothing is compiled for it.")
]
Within = Annotated[
    str | None,
    optional(
        "SIZE",
        "With --compiled: does the compiled step train within 8GiB, say, or 60% of its peak, and how fast?",
        "--budget",
    ),
]
Most = Annotated[
    str | None, optional("SIZE", "Exit with code 1 if the job needs more, as on another GPU: 24GiB.", "--max")
]


@with_job()
def estimate(
    *,
    job: Job,
    gpu: Gpu = None,
    allocator: AllocatorName = None,
    allocator_config: AllocatorConfig = None,
    torch: Torch = None,
    cuda: Cuda = None,
    snapshot: SnapshotFile = None,
    report: ReportFile = None,
    compiled: Compiled = False,
    budget: Within = None,
    most: Most = None,
    store: StoreName = None,
    host_budget: HostBudget = None,
    disk_bandwidth: DiskBandwidth = None,
    json: AsJson = False,
) -> Outcome:
    """Estimate the memory of training a model, or of a script: does it fit, what takes the space, what would fit."""
    check_writable(snapshot, ".pickle")
    check_report(report)
    limit = _budget(budget, job, compiled=compiled)
    most_bytes = None if most is None else Budget.parse(most).nbytes
    if most is not None and most_bytes is None:
        raise RequestError(f"--max {most}: the most that the job may need is a size; write one like 24GiB")
    if isinstance(job.model, Script):
        from overspill.estimation.script_process import client

        client.start()  # it gets ready while this process does
    with narrate() as narrator:
        quiet_torch()
        from overspill.estimation.api import DEFAULT_DEVICE, Setting
        from overspill.estimation.frameworks import FRAMEWORKS
        from overspill.estimation.state_in_store import state_in_store
        from overspill.report.estimate import estimate_answer, estimate_page

        if isinstance(job.model, Source):
            FRAMEWORKS.check_installed(job.model.framework)
        # Estimate the job, and plan it if a budget was given.
        card = DEFAULT_DEVICE if gpu is None else gpu
        placer = job.allocator if allocator is None else allocator
        setting = Setting.of(card, placer, allocator_config, torch, cuda)
        below = _with_store(setting, store, host_budget, disk_bandwidth)
        made, request = estimated(job, setting, narrator, compiled=compiled, quiet=json)
        stored = None if below is None else state_in_store(made, below, fills=gpu is not None)
        within = None
        if limit is not None:
            narrator.now(f"planning {job.name} as torch.compile has it")
            within = _plan(job, limit, made)
        parallel = job.parallel
        request |= {
            "gpus": 1 if parallel is None else parallel.gpus,
            "parallel": None if parallel is None else parallel.kind,
            "micro_batches": None if parallel is None or parallel.kind != "pp" else parallel.pieces,
            "ways": {name: getattr(job, name) for name in job.ways()},
        }
        taken = made if made.compiled is None else made.compiled
        is_over = most_bytes is not None and taken.minimum_capacity_bytes > most_bytes
        # Files, then the verdict.
        asked = gpu is not None
        name = setting.device.name if asked else None
        answer = estimate_answer(request, made, gpu=name, within=within, stored=stored)
        then = _next(made, job, asked=asked, is_over=is_over, is_stored=stored is not None)
        page = estimate_page(made, asked=asked, within=within, stored=stored, then=then)
        if snapshot is not None:
            made.save_snapshot(snapshot)
            narrator.line(f"saved {snapshot}: open it at https://pytorch.org/memory_viz")
    fits = not asked or taken.fits()
    complaint = ""
    if is_over and most_bytes is not None:
        complaint = f"it needs {', more than --max '.join(format_apart(taken.minimum_capacity_bytes, most_bytes))}"
    code = 0 if fits and not complaint and not isinstance(within, InfeasibleBudgetError) else 1
    return of_page(answer, page, {"report": report}, code, complaint)


def _with_store(
    setting: Setting, store: str | None, host_budget: str | None, disk_bandwidth: str | None
) -> Device | None:
    """Return the device with the host memory and the disk of the store that was named; None if none was.

    Raises RequestError.
    """
    if (store, host_budget, disk_bandwidth) == (None, None, None):
        return None
    from overspill.runtime.hardware import as_absent, with_disk
    from overspill.runtime.options import Options
    from overspill.runtime.transfer.registry import store_for

    options = Options(store=store, host_budget=host_budget, disk_bandwidth=disk_bandwidth)
    if store is None:
        return None
    store_for(store, setting.device.kind)
    return with_disk(as_absent(setting.device, setting.software), options)


def _next(made: Estimate, job: Job, *, asked: bool, is_over: bool, is_stored: bool) -> PasteLine | None:
    """Return what to do after the estimate, as a line to paste; None for jobs that nothing else takes.

    `is_over`: it needs more than it may. `is_stored`: it has a store.
    """
    from overspill.report.page import PasteLine

    if isinstance(job.model, Source):
        return None
    if not asked:
        return PasteLine(same_job("estimate", "--gpu", "rtx4090"), "Does it fit? Name your GPU (`overspill devices`):")
    if is_stored:
        return PasteLine(same_job("plan"), "What moves when, and what a step takes:")
    if is_over or not made.fits():
        return PasteLine(same_job("advise"), "What would make it fit, each change tried:")
    if job.optimizer is None or job.parallel is not None:
        return None
    return PasteLine(same_job("plan", "--budget", "50%"), "It fits. What half of its memory would cost:")


def estimated(
    job: Job, setting: Setting, narrator: Narrator, *, compiled: bool, quiet: bool
) -> tuple[Estimate, dict[str, Any]]:
    """Return the estimate of a job, and the request."""
    from overspill.estimation.api import of_job

    if isinstance(job.model, Script):
        return _of_script(job.model, setting, narrator, quiet=quiet)
    if isinstance(job.model, Source):
        from overspill.estimation.frameworks import of_source

        narrator.now(f"reading {job.name}")
        return of_source(job.model, job.batch or 1, job.optimizer, setting), job.request()  # type: ignore[arg-type]
    narrator.now(f"tracing {job.name}")
    return of_job(job, setting, compiled=compiled), job.request()


def _of_script(script: Script, setting: Setting, narrator: Narrator, *, quiet: bool) -> tuple[Estimate, dict[str, Any]]:
    """Return the estimate of a script, and what the script did."""
    from overspill.estimation.script import of_script

    narrator.be_still()  # the terminal is the script's
    narrator.line(f"running {script.path} for {script.iterations} steps on a GPU that is not there")
    made, done = of_script(script, setting, lambda text: narrator.line(f"note: {text}"), quiet=quiet)
    request: dict[str, Any] = {
        "model": script.path,
        "batch": None,
        "optimizer": ", ".join(done.optimizers) or None,
        "dtype": None,
    }
    request |= {"iterations": done.iterations, "trains": done.trains, "notes": list(done.notes)}
    return made, request


def _budget(text: str | None, job: Job, *, compiled: bool) -> Budget | None:
    """Return the budget of the compiled step.

    Raises RequestError if the job has no such step.
    """
    if compiled and isinstance(job.model, (Script, Source)):
        raise RequestError(
            f"--compiled is a model's, and {job.name} is run as it is; leave --compiled out, or name a model"
        )
    if text is None:
        return None
    if not compiled:
        raise RequestError("--budget is for --compiled; `overspill plan` plans the eager step within a budget")
    if job.optimizer is None:
        raise RequestError("--budget is for training; leave out --inference")
    job.check_planned(whole_step=False)
    return Budget.parse(text)


def _plan(job: Job, limit: Budget, made: Estimate) -> Plan | InfeasibleBudgetError:
    """Return the plan of the compiled step within `limit` on the estimate's device, or why no plan exists."""
    from overspill.runtime.options import Options
    from overspill.runtime.preview import preview

    try:
        options = Options(limit, device=made.device, backend="inductor")
        return preview(job, options, made.software, made.compiled)
    except InfeasibleBudgetError as error:
        return error
