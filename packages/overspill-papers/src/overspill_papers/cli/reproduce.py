"""`overspill reproduce`: a paper's figures next to Overspill's."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from overspill.cli.common import AsJson, Outcome, ReportFile, check_report, narrate, optional, quiet_torch


def reproduce(
    paper: Annotated[
        str, typer.Argument(metavar="PAPER", help="vdnn, dymem, window, placement or dnnmem.", show_default=False)
    ],
    table: Annotated[str | None, optional("NAME", "One table or figure alone, as fig11 or table1.")] = None,
    report: ReportFile = None,
    json: AsJson = False,
) -> Outcome:
    """Compute a paper's figures anew, simulated on its machine: where they stand, theirs, ours and the ratio."""
    del json  # `main` reads it from the arguments
    from overspill_papers import papers
    from overspill_papers.papers.figures import figures_of
    from overspill_papers.report.reproduce import reproduce_report, result_figures

    check_report(report)

    # Compute each claim, and report it as it is found.
    begun = time.perf_counter()
    chosen = papers.paper_named(paper)
    claims = papers.claims_of(chosen, table)
    found = []
    with narrate() as narrator, papers.Workers(narrator.now, quiet_torch) as workers:
        narrator.parts(len(claims))
        lab = papers.Lab(narrator.now, workers)
        for result in papers.results(claims, lab, chosen.instead):
            found.append(result)
            narrator.done()
            narrator.now(f"{result.claim.where}: {result.claim.what}", lasting=False)
        if report is not None:
            from overspill.report.page import write_page
            from overspill_papers.report.pages.paper import paper_page

            drawn = [(figure, workers.awaited(figure.compute, lab)) for figure in figures_of(chosen.name, table)]
            write_page(report, paper_page(chosen, found, drawn))
    # The JSON object.
    answer = {
        "paper": chosen.name,
        "title": chosen.title,
        "machine": chosen.machine,
        "simulated": True,
        "without": chosen.without,
        "seconds": time.perf_counter() - begun,
        "counts": asdict(papers.Counts.of(found)),
        "rows": [result_figures(result) for result in found],
    }
    return Outcome(answer, reproduce_report(chosen, found))
