"""`overspill compare`: every policy on one training step, side by side."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from overspill.core.errors import RequestError
from overspill.core.units import format_bytes, format_seconds, size_enough
from overspill.job import Job

from . import complete
from .common import (
    AsJson,
    Backend,
    Budget,
    Gpu,
    Narrator,
    Outcome,
    ReportFile,
    Update,
    WholeStep,
    check_report,
    check_request,
    narrate,
    of_page,
    optional,
    quiet_torch,
    same_job,
)
from .job import with_job
from .software import Cuda, Torch, check_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overspill.placement.place import Placed
    from overspill.plans.comparison import Comparison, Row

ALL = "all"
PolicyNames = Annotated[
    str | None,
    optional(
        "A,B,…",
        "Names that `overspill policies` lists, with parameters as window:window=1GiB,every_step.  [default: all]",
        autocompletion=complete.policies,
    ),
]
Placement = Annotated[
    str | None,
    optional(
        "NAME",
        (
            "What places the blocks of all plans, as `overspill plan` has it; own: each policy's own.  [default: "
            "on a GPU own]"
        ),
        autocompletion=complete.placer,
    ),
]
PlacerNames = Annotated[
    str | None,
    optional(
        "A,B,…",
        "Place every plan by each of these allocators and solvers too; all: the allocators, skyline and portfolio.",
        autocompletion=complete.placers,
    ),
]
PlotFile = Annotated[Path | None, optional("FILE", "Draw memory against time, as .png.", "--plot")]


@with_job()
def compare(
    *,
    job: Job,
    gpu: Gpu = None,
    budget: Budget = None,
    policies: PolicyNames = None,
    whole_step: WholeStep = False,
    update: Update = "device",
    backend: Backend = "eager",
    placement: Placement = None,
    placers: PlacerNames = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    torch: Torch = None,
    cuda: Cuda = None,
    json: AsJson = False,
) -> Outcome:
    """Compare policies on one training step: the memory that each takes, and what that costs in simulated time."""
    del json  # `main` reads it from the arguments
    from overspill.devices import load_device
    from overspill.policies import with_updates
    from overspill.report.picture import check_plot

    # Check all options before torch is imported.
    begun = time.perf_counter()
    names = tuple(map(str, with_updates(policy_names(policies), update)))
    placing = _placer_names(placers)
    limit = check_request(budget, "auto", plot)
    if plot is not None:
        check_plot(plot)
    check_report(report)
    device = load_device("cpu" if gpu is None else gpu)
    check_gpu(device, torch, cuda)
    with narrate() as narrator:
        if policies is None:
            from overspill.policies import POLICIES

            for broken in POLICIES.loaded()[1]:
                narrator.line(f"left out: {broken}")
        quiet_torch()
        from overspill.costs.releases import software_named
        from overspill.plans.comparison import BASELINE
        from overspill.runtime.options import Options
        from overspill.runtime.preview import compare_job

        # Capture once, and plan with each policy.
        options = Options(budget=limit, device=device, placement=placement, whole_step=whole_step, backend=backend)
        narrator.now(f"capturing {job.name} for {device.name}")
        narrator.parts(len(names))
        software = software_named(torch, cuda)
        rows = compare_job(job, options, names, lambda name: narrator.part(f"planning {name}"), software)
        crossings = _crossings(rows, placing, narrator)
    # What was asked, for the JSON.
    request = job.request() | {
        "whole_step": whole_step,
        "backend": backend,
        "gpu": device.name,
        "placement": placement,
        "unmanaged_bytes": rows.unmanaged_bytes,
        "budget_bytes": rows.budget_bytes,
        "baseline": BASELINE,
        "lower_bound_seconds": rows.lower_bound_seconds,
        "figures_of": job.planned_part,
    }
    titled = f"{job.titled(whole_step=whole_step, of_last=True)} on {rows.device.name}"
    return _outcome(request, titled, rows, {"plot": plot, "report": report}, begun, crossings, budget)


def policy_names(asked: str | None) -> tuple[str, ...]:
    """Return the policies that the user named, or all.

    Raises RequestError for an unknown policy.
    """
    from overspill.policies import POLICIES, policies_in, policy_named

    if asked is None:
        return tuple(POLICIES.loaded()[0])
    if not (names := policies_in(asked)):
        raise RequestError(f"--policies names none. Policies: {', '.join(POLICIES)}")
    return tuple(str(policy_named(name)) for name in names)


def _placer_names(asked: str | None) -> tuple[str, ...]:
    """Return the allocators and solvers that the user named.

    `all` means those that need no time limit. Raises RequestError for unknown names.
    """
    from overspill.placement import ALLOCATORS
    from overspill.placement.place import check_placer

    if asked is None:
        return ()
    if asked == ALL:
        return (*ALLOCATORS, "skyline", "portfolio")
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not names:
        raise RequestError("--placers names none; all are meant by `--placers all`")
    for name in names:
        check_placer(name)
    return names


def _crossings(rows: Sequence[Row], placers: Sequence[str], narrator: Narrator) -> list[tuple[str, Placed]]:
    """Return every policy's plan under every placer."""
    from overspill.placement.place import place
    from overspill.simulate import trace_of

    found = []
    planned = [row for row in rows if row.plan is not None] if placers else []
    narrator.parts(len(planned) or None)
    for row in planned:
        assert row.plan is not None
        narrator.part(f"placing {row.policy}")
        trace = trace_of(row.plan.graph, row.plan.schedule)
        found += [(row.policy, place(trace, placer)) for placer in placers]
    return found


def _outcome(
    request: dict[str, Any],
    titled: str,
    rows: Comparison,
    files: Mapping[str, Path | None],
    begun: float,
    crossings: Sequence[tuple[str, Placed]],
    budget: str | None,
) -> Outcome:
    from overspill.report.compare import compare_page, row_figures
    from overspill.report.page import PasteLine
    from overspill.report.picture import draw
    from overspill.report.placements import placement_figures

    device, budget_bytes, unmanaged = rows.device, rows.budget_bytes, rows.unmanaged_bytes
    found = [row_figures(row, device) for row in rows]
    takes = "" if unmanaged is None else f"unmanaged {format_bytes(unmanaged)}, "
    title = f"{titled}, {takes}within {format_bytes(budget_bytes)}: simulated"
    page = compare_page(rows, title, found, crossings)
    if (plot := files["plot"]) is not None:
        draw(page.sections[0], plot, title)
    # The JSON and the page.
    answer = request | {"seconds": time.perf_counter() - begun, "rows": found}
    if crossings:
        answer["placements"] = placement_figures(crossings)
    if (best := next((row.policy for row in rows if row.fits), None)) is not None:
        line = same_job("plan", "--policy", best, *(("--budget", budget) if budget else ()))
        return of_page(answer, replace(page, next=(PasteLine(line, "The plan of the fastest that fits:"),)), files)
    # No policy fits: the exit code is 1.
    least = min(((row.least_bytes, row.policy) for row in rows if row.least_bytes is not None), default=None)
    message = f"infeasible: no policy fits {format_bytes(budget_bytes)}"
    if least is not None:
        message += f"; {least[1]} needs the least, {format_bytes(least[0])}"
        enough = device.index is None or least[0] <= device.memory_bytes
        message += f"; --budget {size_enough(least[0])} would do" if enough else f", more than {device.name} has"
    if (other := rows.instead) is not None and other.plan is not None:
        message += (
            f"; {other.policy} fits in its pool, {other.pool}, and takes {format_seconds(other.plan.step_seconds)}"
        )
    refusal = {"floor_bytes": None if least is None else least[0], "error": message, "exit_code": 1}
    return of_page(answer | refusal, page, files, 1, message)
