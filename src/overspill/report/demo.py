"""The result of `overspill demo`, in about ten lines, and commands to try next."""

from __future__ import annotations

from pathlib import Path

from overspill.core import TensorKind
from overspill.core.units import format_bytes, format_seconds
from overspill.runtime.training import Run

from .listing import percent
from .page import Column, Page, Table, Unit, Verdict
from .tables import Cell
from .training import Trained, moved, usual_step_seconds

NEXT = (
    "overspill estimate gpt2 --batch 64 --optimizer adamw --gpu rtx3060",
    "overspill advise gpt2 --batch 64 --optimizer adamw --gpu rtx3060",
    "overspill plan resnet50 --batch 32 --budget 50% --gpu t4",
)
"""Commands that need no GPU and no file of the user's."""


def demo_page(trained: Trained, report: Path, seconds: float) -> Page:
    """Return the page of the demo: the trained model, both runs compared, and commands to try next.

    `report` is the path of the page of the run.
    """
    job, plan, reference = trained.job, trained.plan, trained.reference
    assert reference is not None
    measured, plain = trained.managed.measured_peak_bytes, reference.measured_peak_bytes
    parameters = format_bytes(plan.graph.bytes_of(TensorKind.PARAMETER))
    columns = (
        Column(""), Column("peak memory", Unit.BYTES), Column("first loss", Unit.NUMBER),
        Column("last loss", Unit.NUMBER),
        Column("usual step", Unit.SECONDS),
    )  # fmt: skip
    # Plain PyTorch against the budget.
    rows = (_row("plain PyTorch", reference), _row(f"budget {format_bytes(plan.asked_bytes)}", trained.managed))
    equal = (
        f"identical: the {len(reference.losses)} losses and all {len(reference.state)} weights and buffers are equal "
        "to the last bit"
    )
    return Page(
        f"{job.name}: parameters of {parameters}, trained by {job.optimizer} for {len(trained.managed.losses)} steps "
        f"of {job.batch} sequences on this CPU",
        Verdict(f"{equal}." if trained.identical else f"DIFFERENT: {trained.difference}.", trained.identical),
        (Table("", columns, rows),),
        (
            f"It took {percent(measured, plain)} of plain PyTorch's memory, measured; each step {moved(trained)}.",
            f"All of it took {format_seconds(seconds)}.",
            f"The run in pictures: {report}",
            "What to try next (none of it needs a GPU):",
            *(f"  {command}" for command in NEXT),
        ),
    )


def _row(what: str, run: Run) -> tuple[Cell, ...]:
    losses = (f"{loss:.6f}" for loss in (run.losses[0], run.losses[-1]))
    return what, run.measured_peak_bytes, *losses, usual_step_seconds(run)
