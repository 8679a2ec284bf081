"""`overspill train`: train for real within a budget, and prove the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.errors import OverspillError, RequestError, StoreError, is_out_of_memory
from overspill.core.units import format_bytes
from overspill.job import Job

from . import complete
from .common import (
    AsJson,
    Backend,
    Budget,
    DiskBandwidth,
    HostBudget,
    Narrator,
    Outcome,
    PlacerName,
    PlanFile,
    PolicyName,
    ReportFile,
    SnapshotFile,
    StoreDir,
    StoreName,
    TimesFile,
    TraceFile,
    Update,
    WholeStep,
    check_report,
    check_request,
    check_writable,
    narrate,
    of_page,
    optional,
    quiet_torch,
    updating,
)
from .job import with_job

if TYPE_CHECKING:
    from overspill.report.training import Trained
    from overspill.runtime.options import Options
    from overspill.runtime.recording.recorder import RunRecorder
    from overspill.runtime.training import Run

DIFFERS = 1

Steps = Annotated[int, typer.Option(min=1, help="How many steps to train.")]
Check = Annotated[bool, typer.Option("--check", help="Run plainly too, and compare all numbers bit by bit.")]
Checksum = Annotated[bool, typer.Option("--checksum", help="Check that bytes come back unchanged (on the CPU).")]
Partition = Annotated[
    float | None,
    optional("SHARE", ("Inductor's partition for this activation_memory_budget.  [default: the best of several]")),
]
DeviceName = Annotated[
    str | None,
    optional(
        "NAME",
        "Where to train: cpu or cuda.  [default: cuda if there is one]",
        autocompletion=complete.constants("cpu", "cuda"),
    ),
]
ProfileFile = Annotated[Path | None, optional("FILE", "Measure op times and save them, for --times.")]


@with_job()
def train(
    *,
    job: Job,
    budget: Budget = None,
    policy: PolicyName = "auto",
    placement: PlacerName = None,
    steps: Steps = 3,
    store: StoreName = None,
    store_dir: StoreDir = None,
    host_budget: HostBudget = None,
    disk_bandwidth: DiskBandwidth = None,
    check: Check = False,
    checksum: Checksum = False,
    backend: Backend = "eager",
    partition: Partition = None,
    whole_step: WholeStep = False,
    update: Update = "device",
    device: DeviceName = None,
    out: PlanFile = None,
    times: TimesFile = None,
    profile: ProfileFile = None,
    report: ReportFile = None,
    trace: TraceFile = None,
    snapshot: SnapshotFile = None,
    json: AsJson = False,
) -> Outcome:
    """Train a model within a memory budget for some steps, on random data from a fixed seed."""
    del json  # `main` reads it from the arguments
    limit = check_request(budget, policy, out)
    policy = updating(policy, update)
    check_writable(trace, ".json")
    check_writable(snapshot, ".pickle")
    check_report(report)
    with narrate() as narrator:
        quiet_torch()
        from overspill.costs import MeasuredTimes
        from overspill.report.training import training_page
        from overspill.runtime.options import Options
        from overspill.runtime.recording.recorder import RunRecorder

        # Options, with defaults for the device.
        job.check_trained(whole_step=whole_step)
        where = _device(device)
        store = store or ("disk" if where == "cpu" else "pinned")
        options = Options(
            budget=limit,
            policy=policy,
            store=store,
            store_dir=store_dir,
            host_budget=host_budget,
            disk_bandwidth=disk_bandwidth,
            backend=backend,
            partition=partition,
            times=None if times is None else MeasuredTimes.load(times),
            profile=profile is not None,
            placement=placement,
            checksum=checksum,
            whole_step=whole_step,
        )
        recorder = (
            None if trace is None and snapshot is None else RunRecorder(by_hand=True, snapshot=snapshot is not None)
        )
        _try_store(options, where)
        narrator.now(f"capturing and planning {job.name}")
        trained = run_training(job, options, narrator, recorder, steps=steps, device=where, check=check)
    # Files that were asked for.
    if out is not None:
        trained.plan.schedule.save(out)
    if profile is not None and trained.managed.times is not None:
        trained.managed.times.save(profile)
    files = {"plan": out, "report": report, "trace": trace, "snapshot": snapshot}
    _write(trained, trace, snapshot)
    code = 0 if trained.identical in (True, None) else DIFFERS
    complaint = "" if code == 0 else f"not identical to plain PyTorch: {trained.difference}"
    return of_page(_answer(trained), training_page(trained), files, code, complaint)


def _write(trained: Trained, trace: Path | None, snapshot: Path | None) -> None:
    """Write the run in each requested form except its page."""
    from overspill.report.tracing import write_run_snapshot, write_run_trace

    if (record := trained.managed.record) is None:
        return
    title = f"{trained.job.name}, batch {trained.job.batch}, policy {trained.options.policy}"
    if trace is not None:
        write_run_trace(record, record.plans, trace, title)
    if snapshot is not None:
        write_run_snapshot(record, snapshot)


def _device(name: str | None) -> str:
    """Return the torch device that `name` means."""
    from overspill.runtime import accelerator

    if name is None:
        return "cuda" if accelerator.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name, re.ASCII):
        raise RequestError(f"unknown device {name!r}; train on cpu, cuda or cuda:N")
    return name


def _try_store(options: Options, device: str) -> None:
    """Raise RequestError for a store that cannot be opened, before the model is built."""
    import torch

    from overspill.runtime.transfer.registry import make_store

    make_store(options.store, torch.device(device), options.store_dir, options.host_bytes).close()


def run_training(
    job: Job,
    options: Options,
    narrator: Narrator,
    recorder: RunRecorder | None = None,
    *,
    steps: int,
    device: str,
    check: bool,
) -> Trained:
    """Train within the budget, and with `check` also without Overspill.

    `recorder` records the managed run.
    """
    from overspill.report.training import Trained
    from overspill.runtime.accelerator import repeatable_kernels
    from overspill.runtime.training import train as train_managed

    def on_step(index: int, loss: float) -> None:
        narrator.line(f"step {index + 1}/{steps}: loss {loss:.6g}")
        narrator.done()
        narrator.now("training", lasting=False)

    if check and options.backend == "inductor" and device == "cpu":
        import torch

        torch.set_num_threads(1)
        narrator.line("one thread: with several, Inductor's kernels add up some gradients in an order that changes")
    if check and device != "cpu":
        repeatable_kernels()
        narrator.line("kernels that repeat themselves: others add up some gradients in an order that changes")
    # The run within the budget, and then its reference.
    narrator.parts(steps)
    managed = train_managed(job, options, on_step, recorder, steps=steps, device=device, keep_state=check)
    if managed.plan is None:
        raise OverspillError(
            f"{job.name} gave no graph that could be planned; let its loss depend on parameters that require gradients"
        )
    trained = Trained(job, options, device, managed, managed.plan)
    return trained.checked_against(_reference(trained, narrator)) if check else trained


def _reference(trained: Trained, narrator: Narrator) -> Run:
    """Return the same steps without Overspill.

    Raises StoreError if they do not fit in this machine's memory.
    """
    from overspill.runtime.training import train_plain

    narrator.parts(len(trained.managed.losses))
    narrator.now("training the same steps without Overspill")
    try:
        return train_plain(
            trained.job,
            trained.options,
            lambda *_: narrator.done(),
            trained.managed.partition,
            steps=len(trained.managed.losses),
            device=trained.device,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The reference needs the memory that the plan saves.
        peak = format_bytes(trained.plan.unmanaged_peak_bytes)
        raise StoreError(
            f"the managed run finished, but its reference, which needs {peak}, ran out of memory; train without --check"
        ) from None


def _answer(trained: Trained) -> dict[str, Any]:
    run, plan, options = trained.managed, trained.plan, trained.options
    # What was asked for, measured and planned.
    placed = trained.placed
    answer = trained.job.request() | {
        "policy": options.policy,
        "whole_step": options.whole_step,
        "device": trained.device,
        "store": options.store,
        "checksum": options.checksum,
        "backend": options.backend,
        "partition": run.partition,
        "budget_bytes": plan.asked_bytes,
        "planned_peak_bytes": run.planned_peak_bytes,
        "planned_reserved_bytes": run.planned_reserved_bytes,
        "planned_device_bytes": run.planned_device_bytes,
        "placement": placed.placer,
        "placed_peak_bytes": placed.peak_bytes,
        "fragmentation": placed.fragmentation,
        "measured_peak_bytes": run.measured_peak_bytes,
        "reserved_peak_bytes": run.reserved_peak_bytes,
        "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
        "offloaded_bytes": run.offloaded_bytes,
        "disk_written_bytes": plan.disk_written_bytes,
        "disk_read_bytes": plan.disk_read_bytes,
        "stored_bytes": trained.stored_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "recomputed_ops": plan.recomputed_ops,
        "losses": run.losses,
        "step_seconds": run.step_seconds,
        "simulated_step_seconds": plan.step_seconds,
        "plan_seconds": plan.plan_seconds,
    }
    if trained.reference is not None:
        # How the run compares with the reference.
        answer |= {
            "reference_losses": trained.reference.losses,
            "reference_peak_bytes": trained.reference.measured_peak_bytes,
            "reference_step_seconds": trained.reference.step_seconds,
            "identical": trained.identical,
            "differing_tensors": list(trained.differing_tensors),
        }
    return answer
