"""`overspill pack`: find an address for each block of a trace, in as few bytes as possible."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.errors import RequestError
from overspill.core.units import parse_bytes

from . import complete
from .common import AsJson, Outcome, ReportFile, check_report, check_writable, narrate, of_page, optional, same_job

if TYPE_CHECKING:
    from overspill.placement.packing.base import Solution
    from overspill.placement.packing.files import TraceFile
    from overspill.placement.packing.verdict import PackingVerdict

BlocksFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Blocks as CSV (id,lower,upper,size), a saved Trace, or a PyTorch memory snapshot; - for standard input.",
        show_default=False,
    ),
]
Capacity = Annotated[
    str | None,
    optional(
        "SIZE",
        "Bytes that the layout may take, as 1048576 or 12GiB; the search ends when it does.  [default: as few as "
        "possible]",
    ),
]
SolverName = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="portfolio, exact, or another that the docs list.", autocompletion=complete.solver
    ),
]
TimeLimit = Annotated[
    float | None,
    optional(
        "SECONDS",
        "Search so long for a better layout, unless the best there can be is found; Ctrl-C ends it with the best "
        "found.  [default: while it gains anything, 10 at most]",
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same search.")]
DeviceNumber = Annotated[
    int | None, optional("N", "Which device of a snapshot.  [default: the first that has events]", "--device", min=0)
]
LayoutFile = Annotated[
    Path | None,
    optional("FILE", "Write the blocks there as CSV, each with its offset in the best layout found.", "--out"),
]
PlotFile = Annotated[Path | None, optional("FILE", "Draw addresses over time, as .png.", "--plot")]


def pack(
    file: BlocksFile,
    capacity: Capacity = None,
    solver: SolverName = "portfolio",
    time_limit: TimeLimit = None,
    seed: Seed = 0,
    device: DeviceNumber = None,
    out: LayoutFile = None,
    plot: PlotFile = None,
    report: ReportFile = None,
    json: AsJson = False,
) -> Outcome:
    """Give every block an address, so that no two live ones overlap, in few bytes. Exit code 1: they do not fit."""
    del json  # `main` reads it from the arguments
    from overspill.placement.packing.base import LEAST_GAIN, Limits
    from overspill.placement.packing.files import read_trace, write_layout
    from overspill.placement.packing.registry import solver_named
    from overspill.placement.packing.verdict import verdict
    from overspill.report.pack import pack_page, refusal
    from overspill.report.page import PasteLine, Step
    from overspill.report.picture import check_plot, draw

    # Check all options before the search.
    chosen = solver_named(solver)
    capacity_bytes = parse_bytes(capacity) if capacity is not None else None
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise RequestError(f"--time-limit {time_limit:g} is no time to search in; write seconds above 0, as 10")
    check_writable(out)
    check_writable(plot)
    check_report(report)
    if plot is not None:
        check_plot(plot)
    limits = Limits(capacity_bytes, seed=seed, least_gain=LEAST_GAIN)
    if time_limit is not None:
        limits = Limits(capacity_bytes, time_limit, seed)
    with narrate("reading") as narrator:
        read = read_trace(file, device)
        narrator.now(f"packing {len(read.columns)} blocks with {chosen.name}")
        narrator.at_most(limits.time_limit_seconds)
        solution = chosen.solve(read.columns if read.known is None else read.known, limits)
        narrator.parts(None)
        # Files that were asked for; without a layout there is only the report.
        found = verdict(read.columns, solution, capacity_bytes)
        title = f"{read.path.name}: {len(read.columns)} blocks, {chosen.name}"
        page = pack_page(solution, read, title, capacity_bytes, chosen, _remarks(read), found)
        files = {"layout": out, "plot": plot, "report": report}
        if solution.layout is None:
            files = {"report": report}
        elif out is not None:
            write_layout(out, read, solution.layout)
        if plot is not None and solution.layout is not None:
            narrator.now(f"drawing {plot}")
            draw(next(section for section in page.sections if isinstance(section, Step)), plot, title)
    # The exit code is 1 where it does not fit.
    answer = {"file": str(read.path), "solver": chosen.name, **_answer(read, solution, found, capacity_bytes)}
    if found.fits:
        if out is None:
            line = PasteLine(same_job("pack", "--out", "placed.csv"), "The blocks with their addresses:")
            page = replace(page, next=(line,))
        return of_page(answer, page, files)
    complaint = refusal(read, solution, found, capacity_bytes)
    return of_page(answer | {"error": complaint, "exit_code": 1}, page, files, 1, complaint)


def _remarks(read: TraceFile) -> list[str]:
    """Return notes on the data of the file that has no effect."""
    found = []
    if never := int(((read.columns.nbytes > 0) & ~read.columns.live).sum()):
        one = "1 block is live at no time, and takes no memory"
        found.append(one if never == 1 else f"{never} blocks are live at no time, and take no memory")
    if unused := read.table.without_effect if read.table is not None else ():
        found.append(f"columns without effect: {', '.join(unused)}")
    return found


def _answer(read: TraceFile, solution: Solution, found: PackingVerdict, capacity_bytes: int | None) -> dict[str, Any]:
    layout = solution.layout
    blame = {"blame": [read.label(position) for position in found.infeasible_core]} if found.infeasible else {}
    return {
        "blocks": len(read.columns),
        "capacity_bytes": capacity_bytes,
        "peak_bytes": None if layout is None else layout.peak_bytes,
        "lower_bound_bytes": read.lower_bound_bytes if layout is None else layout.lower_bound_bytes,
        "bound_bytes": solution.bound_bytes,
        "gap": None if layout is None else solution.gap,
        "optimal": solution.optimal,
        "seconds": solution.seconds,
        "feasible": found.fits,
        **({"stopped": solution.stopped} if solution.stopped else {}),
        **blame,
    }
