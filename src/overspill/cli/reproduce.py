"""`overspill reproduce`: the figures of a paper beside what Overspill finds for them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .common import AsJson, Outcome, narrate, quiet_torch


def reproduce(
    paper: Annotated[
        str, typer.Argument(metavar="PAPER", help="vdnn, dymem, window, placement or dnnmem.", show_default=False)
    ],
    table: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One table or figure alone, as fig11 or table1.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Draw the paper's figures beside ours, and all that the paper draws as ours, in a page for a browser.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
) -> Outcome:
    """Compute a paper's figures anew, simulated on its machine: where they stand, theirs, ours and the ratio."""
    del json  # `main` reads it from the arguments
    from overspill import papers
    from overspill.papers.figures import figures_of
    from overspill.report.paper_page import check_page, draw_page
    from overspill.report.reproduce import reproduce_report, result_figures

    if plot is not None:
        check_page(plot)

    begun = time.perf_counter()
    chosen = papers.paper_named(paper)
    claims = papers.claims_of(chosen, table)
    found = []
    with narrate() as narrator:
        quiet_torch()
        narrator.parts(len(claims))
        lab = papers.Lab(narrator.now)
        for result in papers.results(claims, lab):
            found.append(result)
            narrator.done()
            narrator.now(f"{result.claim.where}: {result.claim.what}", lasting=False)
        if plot is not None:
            drawn = [(figure, figure.compute(lab)) for figure in figures_of(chosen.name, table)]
            draw_page(chosen, found, drawn, plot)
    answer = {
        "paper": chosen.name,
        "title": chosen.title,
        "machine": chosen.machine,
        "simulated": True,
        "seconds": time.perf_counter() - begun,
        "counts": asdict(papers.Counts.of(found)),
        "rows": [result_figures(result) for result in found],
    }
    return Outcome(answer, reproduce_report(chosen, found))
