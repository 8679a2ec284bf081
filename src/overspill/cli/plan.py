"""`overspill plan`: plan a step under a budget, without running it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.budget import Budget as Limit
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.garbage import without_collection
from overspill.job import Job, Script

from .common import (
    AsJson,
    Backend,
    Budget,
    DiskBandwidth,
    Gpu,
    HostBudget,
    Outcome,
    PlacerName,
    PlanFile,
    PolicyName,
    ReportFile,
    SnapshotFile,
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
    same_job,
    updating,
)
from .failures import explain, in_options
from .job import with_job
from .software import Cuda, Torch, check_gpu

if TYPE_CHECKING:
    from overspill.placement.place import Placed
    from overspill.plans.plan import Plan


MemoryPlot = Annotated[
    Path | None, optional("FILE", "Draw memory over time, planned and unmanaged, as .png.", "--plot")
]
MostSlowdown = Annotated[
    str | None, optional("SHARE", "Plan the largest batch that takes at most so much more time, as 1%.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print all figures of the plan.")]

DOES_NOT_FIT = 1
SETTINGS = ("--budget", "--placement", "--whole-step")
"""The settings that errors recommend."""


@with_job()
@without_collection()  # the modules that are imported, the captures and the plan live until the command ends
def plan(
    *,
    job: Job,
    budget: Budget = None,
    policy: PolicyName = "auto",
    placement: PlacerName = None,
    gpu: Gpu = None,
    whole_step: WholeStep = False,
    update: Update = "device",
    store: StoreName = None,
    host_budget: HostBudget = None,
    disk_bandwidth: DiskBandwidth = None,
    backend: Backend = "eager",
    out: PlanFile = None,
    report: ReportFile = None,
    plot: MemoryPlot = None,
    trace: TraceFile = None,
    snapshot: SnapshotFile = None,
    times: TimesFile = None,
    most_slowdown: MostSlowdown = None,
    verbose: Verbose = False,
    torch: Torch = None,
    cuda: Cuda = None,
    json: AsJson = False,
) -> Outcome:
    """Plan one training step within a budget, and simulate it: no memory is taken and nothing is run."""
    from overspill.costs import MeasuredTimes
    from overspill.devices import load_device
    from overspill.report.picture import check_plot

    # Check all options before torch is imported.
    limit = check_request(budget, policy, out)
    policy = updating(policy, update)
    more = None if most_slowdown is None else Limit.parse(most_slowdown).share
    if most_slowdown is not None and (more is None or isinstance(job.model, Script) or limit.is_relative):
        raise RequestError("--most-slowdown: it is a share as 1%, of a model in a --budget that is a size; change that")
    check_writable(plot)
    check_writable(trace, ".json")
    check_writable(snapshot, ".pickle")
    check_report(report)
    if plot is not None:
        check_plot(plot)
    device = load_device("cpu" if gpu is None else gpu)
    check_gpu(device, torch, cuda)
    from overspill.core.garbage import without_collection

    # Nothing of the many small objects is garbage.
    with narrate() as narrator, without_collection():
        quiet_torch()
        from overspill.costs.releases import software_named
        from overspill.runtime.options import Options
        from overspill.runtime.preview import largest_batch, preview_with_least

        narrator.now(f"capturing and planning {job.name} for {device.name}")
        measured = None if times is None else MeasuredTimes.load(times)
        software = software_named(torch, cuda)
        options = Options(
            limit, policy, store, device=device, times=measured, placement=placement, whole_step=whole_step,
            backend=backend, host_budget=host_budget, disk_bandwidth=disk_bandwidth,
        )  # fmt: skip
        if more is not None:
            job = replace(job, batch=largest_batch(job, options, software, 1 + more, narrator.now))
            narrator.now(f"planning batch {job.batch}, the largest")
        title = f"{job.titled(whole_step=whole_step)} on {device.name}, policy {policy}"
        request = job.request() | {"gpu": device.name, "policy": policy, "whole_step": whole_step, "backend": backend}
        try:
            made, least_bytes = preview_with_least(job, options, software)
            if json or verbose or report is not None:
                narrator.detail("proving how fast a step can be")
                _ = made.lower_bound_seconds  # which stays
        except InfeasibleBudgetError as error:
            return _infeasible(request, error, title, report)
    # The plan itself, then all that was asked for about it.
    if out is not None:
        made.schedule.save(out)
    files = {"plan": out, "plot": plot, "report": report, "trace": trace, "snapshot": snapshot}
    _write(made, title, files)
    return _feasible(request, made, least_bytes, title, files, most_slowdown, json=json, verbose=verbose)


def _feasible(
    request: dict[str, Any],
    made: Plan,
    least_bytes: int | None,
    title: str,
    files: dict[str, Path | None],
    most_slowdown: str | None,
    *,
    json: bool,
    verbose: bool,
) -> Outcome:
    """Return the outcome of a plan; what proves and places it once more is done only if it is shown.

    With `most_slowdown` the batch of the request was found.
    """
    from overspill.placement.place import place_plan
    from overspill.report.listing import percent
    from overspill.report.page import Figure, PasteLine
    from overspill.report.plan import brief_page, plan_page, too_small

    inductor = request["backend"] == "inductor"
    if json or verbose or files["report"] is not None:
        placed = place_plan(made, made.pool)
        answer = request | _figures(made, least_bytes, placed) if json else {}
        page = plan_page(made, title, made.pool, placed, least_bytes, inductor=inductor)
    else:
        answer, page = {}, brief_page(made, title, least_bytes, inductor=inductor)
    if most_slowdown is not None:
        cost = f"with at most {most_slowdown} more time; its step takes {percent(max(made.slowdown - 1, 0), 1)} more"
        found = Figure("largest batch", str(request["batch"]), cost)
        page = replace(page, verdict=replace(page.verdict, figures=(found, *page.verdict.figures)))
    if made.fits_device and not page.next:
        batch = () if most_slowdown is None else ("--batch", str(request["batch"]))
        line = same_job("plan", *batch, "--budget", "50%")
        half = PasteLine(line, "It fits without a plan. What half of its memory would cost:")
        page = replace(page, next=(half,))
    if made.fits_device:
        return of_page(answer, page, files, brief=not verbose)
    message = f"{too_small(made)}; without --budget it is planned for that"
    return of_page(answer | {"error": message, "exit_code": DOES_NOT_FIT}, page, files, DOES_NOT_FIT, message)


def _figures(made: Plan, least_bytes: int | None, placed: Placed) -> dict[str, Any]:
    """Return all figures of a plan and its layout, for the JSON."""
    from overspill.report.plan import peak_of, peak_rows, stored_by_kind, timed_part
    from overspill.runtime.transfer.stores import store_bytes

    peak = peak_of(made)
    return {
        "budget_bytes": made.asked_bytes,
        "figures_of": timed_part(made).removeprefix("for "),
        "least_bytes": least_bytes,
        "peak_bytes": made.peak_bytes,
        "reserved_bytes": made.reserved_bytes,
        "device_bytes": made.device_bytes,
        "library_bytes": made.library_bytes,
        "unmanaged_peak_bytes": made.unmanaged_peak_bytes,
        "unmanaged_device_bytes": None if made.device_bytes is None else made.unmanaged_bytes,
        "feasible": made.fits_device,
        "offloaded_bytes": made.offloaded_bytes,
        "stored_bytes": sum(stored_by_kind(made).values()),
        "host_bytes": store_bytes(made) if made.tiers is None else made.tiers.host_peak_bytes,
        "disk_bytes": 0 if made.tiers is None else made.tiers.disk_bytes,
        "disk_written_bytes": made.disk_written_bytes,
        "disk_read_bytes": made.disk_read_bytes,
        "disk_seconds": made.timeline.disk_seconds,
        "model_on_host": made.model_on_host,
        "recomputed_flops": made.recomputed_flops,
        "recomputed_ops": made.recomputed_ops,
        "step_seconds": made.step_seconds,
        "in_core_step_seconds": made.in_core_seconds,
        "slowdown": made.slowdown,
        "lower_bound_seconds": made.lower_bound_seconds,
        "gap": made.gap,
        "exposed_transfer_seconds": float(made.timeline.exposed_transfer_seconds),
        "communication_seconds": made.timeline.communication_seconds,
        "exposed_communication_seconds": made.timeline.exposed_communication_seconds,
        "recomputing_seconds": made.recomputing_seconds,
        "plan_seconds": made.plan_seconds,
        "placement": placed.placer,
        "placed_peak_bytes": placed.peak_bytes,
        "fragmentation": placed.fragmentation,
        "peak_op": peak.at,
        "breakdown": {kind.value: nbytes for kind, nbytes in peak.by_kind.items()},
        "peak_tensors": peak_rows(made.graph, peak),
    }


def _write(made: Plan, title: str, files: dict[str, Path | None]) -> None:
    """Write a plan in each requested form, except the plan itself and its page."""
    from overspill.report.page.step import step
    from overspill.report.picture import draw
    from overspill.report.tracing import write_plan_snapshot, write_plan_trace

    if (plot := files["plot"]) is not None:
        draw(step(made, made.pool), plot, title)
    if (trace := files["trace"]) is not None:
        write_plan_trace(made, trace, title)
    if (snapshot := files["snapshot"]) is not None:
        write_plan_snapshot(made, snapshot)


def _infeasible(request: dict[str, Any], error: InfeasibleBudgetError, title: str, report: Path | None) -> Outcome:
    """Return the outcome where no plan exists.

    The JSON object has all keys; those of the plan are null.
    """
    unknown = (
        "figures_of", "least_bytes", "peak_bytes", "reserved_bytes", "device_bytes", "library_bytes",
        "unmanaged_peak_bytes", "unmanaged_device_bytes", "offloaded_bytes", "stored_bytes", "host_bytes", "disk_bytes",
        "disk_written_bytes", "disk_read_bytes", "disk_seconds", "model_on_host",
        "recomputed_flops", "recomputed_ops", "step_seconds", "in_core_step_seconds", "slowdown", "lower_bound_seconds",
        "gap", "exposed_transfer_seconds", "communication_seconds", "exposed_communication_seconds",
        "recomputing_seconds", "plan_seconds",
        "placement", "placed_peak_bytes", "fragmentation",
    )  # fmt: skip
    answer = request | dict.fromkeys(unknown) | {
        "budget_bytes": error.budget_bytes,
        "feasible": False,
        "floor_bytes": error.floor_bytes,
        "cause": error.cause,
        "error": (message := in_options(explain(error).message, SETTINGS)),
        "exit_code": error.exit_code,
    }  # fmt: skip
    # A page about what would do.
    if report is not None:
        from overspill.report.page import write_page
        from overspill.report.plan import infeasible_page

        write_page(report, infeasible_page(error, title, partial(in_options, options=SETTINGS)))
    return Outcome(answer, None, error.exit_code, message)
