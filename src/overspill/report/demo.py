"""The result of `overspill demo`, in about ten lines, and commands to try next."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core import TensorKind
from overspill.core.units import format_bytes, format_seconds
from overspill.runtime.training import Run

from .listing import listing, percent
from .training import Trained, moved, usual_step_seconds

NEXT = (
    "overspill estimate gpt2 --batch 64 --optimizer adamw --gpu rtx3060",
    "overspill advise gpt2 --batch 64 --optimizer adamw --gpu rtx3060",
    "overspill plan resnet50 --batch 32 --budget 50% --gpu t4",
)
"""Commands that need no GPU and no file of the user's."""


def demo_report(trained: Trained, page: Path, seconds: float) -> RenderableType:
    """What was trained, both runs compared, and commands to try next."""
    job, plan, reference = trained.job, trained.plan, trained.reference
    assert reference is not None
    measured, plain = trained.managed.measured_peak_bytes, reference.measured_peak_bytes
    parameters = format_bytes(plan.graph.bytes_of(TensorKind.PARAMETER))
    # Plain PyTorch against the budget.
    rows = [_row("plain PyTorch", reference), _row(f"budget {format_bytes(plan.asked_bytes)}", trained.managed)]
    equal = f"all {len(reference.state)} weights and buffers"
    verdict = (
        f"identical: the {len(reference.losses)} losses and {equal} are equal to the last bit"
        if trained.identical
        else f"DIFFERENT: {trained.difference}"
    )
    lines = [
        f"{verdict}.",
        f"It took {percent(measured, plain)} of plain PyTorch's memory, measured: {moved(trained)}.",
        f"All of it took {format_seconds(seconds)}.",
        f"The run in pictures: {page}",
    ]
    # What was trained, for the first line.
    head = (
        f"{job.name}: parameters of {parameters}, trained by {job.optimizer} for {len(trained.managed.losses)} steps of "
        f"{job.batch} sequences on this CPU"
    )
    return Group(
        Text(head),
        "",
        listing(("", "peak memory", "first loss", "last loss", "usual step"), rows, numbers=(1, 2, 3, 4)),
        "",
        *map(Text, lines),
        "",
        Text("What to try next (none of it needs a GPU):"),
        *(Text(f"  {command}") for command in NEXT),
    )


def _row(what: str, run: Run) -> tuple[str, ...]:
    losses = (f"{loss:.6f}" for loss in (run.losses[0], run.losses[-1]))
    return what, format_bytes(run.measured_peak_bytes), *losses, format_seconds(usual_step_seconds(run))
