"""`overspill sweep`: the cost of a training step at every budget."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.units import format_bytes
from overspill.job import Job

from . import complete
from .common import (
    AsJson,
    Backend,
    Gpu,
    Outcome,
    ReportFile,
    WholeStep,
    check_report,
    narrate,
    of_page,
    quiet_torch,
    same_job,
)
from .compare import policy_names
from .job import with_job
from .software import Cuda, Torch, check_gpu

if TYPE_CHECKING:
    from overspill.plans.sweep import Sweep

PolicyNames = Annotated[
    str,
    typer.Option(
        metavar="A,B,…",
        help="Names that `overspill policies` lists; each has a curve of its own.",
        autocompletion=complete.policies,
    ),
]
Points = Annotated[
    int, typer.Option(metavar="K", help="The most budgets to plan for; fewer where the curve is known with them.")
]


@with_job()
def sweep(
    *,
    job: Job,
    gpu: Gpu = None,
    policies: PolicyNames = "auto",
    points: Points = 12,
    whole_step: WholeStep = False,
    backend: Backend = "eager",
    torch: Torch = None,
    cuda: Cuda = None,
    report: ReportFile = None,
    json: AsJson = False,
) -> Outcome:
    """Find what a training step costs at every budget, from all that it takes down to the smallest that works."""
    del json  # `main` reads it from the arguments
    from overspill.devices import load_device
    from overspill.plans.sweep import check_points

    # Check all options before torch is imported.
    begun = time.perf_counter()
    names = policy_names(policies)
    check_points(points)
    check_report(report)
    device = load_device("cpu" if gpu is None else gpu)
    check_gpu(device, torch, cuda)
    with narrate() as narrator:
        quiet_torch()
        from overspill.costs.releases import software_named
        from overspill.runtime.options import Options
        from overspill.runtime.preview import sweep_job

        # Capture once, and plan for many budgets.
        options = Options(device=device, whole_step=whole_step, backend=backend)
        narrator.now(f"capturing {job.name} for {device.name}")
        found = sweep_job(job, options, names, points, narrator.now, software_named(torch, cuda))
    request = job.request() | {
        "whole_step": whole_step, "backend": backend, "gpu": device.name, "figures_of": job.planned_part,
    }  # fmt: skip
    titled = job.titled(whole_step=whole_step, of_last=True)
    title = f"{titled} on {device.name}, at every budget: simulated"
    return _outcome(request, found, title, begun, report)


def _outcome(request: dict[str, Any], found: Sweep, title: str, begun: float, report: Path | None) -> Outcome:
    from overspill.report.page import PasteLine
    from overspill.report.sweep import point_figures, sweep_page

    answer = request | {
        "capacity_bytes": found.device.memory_bytes,
        "unmanaged_peak_bytes": found.unmanaged_peak_bytes,
        "unmanaged_device_bytes": found.unmanaged_device_bytes,
        "floors": [
            {"policy": name, "floor_bytes": floor.nbytes, "cause": floor.cause} for name, floor in found.floors.items()
        ],
        "seconds": time.perf_counter() - begun,
        "rows": [point_figures(found, point) for point in found.points],
    }
    page, files = sweep_page(found, title), {"report": report}
    if fitting := [point for point in found.points if found.fits(point)]:
        policy = min(fitting, key=lambda point: point.budget_bytes).policy
        line = same_job("plan", "--policy", policy, "--budget", "smallest")
        return of_page(answer, replace(page, next=(PasteLine(line, "The plan of the smallest budget:"),)), files)
    # No plan fits the device: the exit code is 1.
    needed = min(p.plan.needed_bytes for p in found.points if p.plan is not None)
    room = format_bytes(found.device.memory_bytes)
    message = (
        f"infeasible: no budget fits the {room} of {found.device.name}; {format_bytes(needed)} are needed at least"
    )
    return of_page(answer | {"error": message, "exit_code": 1}, page, files, 1, message)
