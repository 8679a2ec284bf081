"""`overspill demo`: train a small model in less than half its memory.

Plain PyTorch trains the same steps for comparison.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.job import Job, NamedModel

from .common import AsJson, Outcome, check_writable, narrate, of_page, optional, quiet_torch

if TYPE_CHECKING:
    from overspill.report.training import Trained

# Half a minute on two cores, most of it PyTorch's start, the capture, and ten steps; its feature maps are what is
# large.
MODEL, BATCH, OPTIMIZER, BUDGET, STEPS = (
    "decoder:width=256,depth=4,heads=4,vocabulary=512,seq_len=128",
    16,
    "adamw",
    "45%",
    5,
)
Page = Annotated[
    Path | None, optional("FILE.html", "Where the report page goes.  [default: the temporary directory]", "--report")
]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Name the report page; do not open it in a browser.")]


def demo(report: Page = None, no_open: NoOpen = False, json: AsJson = False) -> Outcome:
    """Train a small model in less than half of its memory on this CPU, in under a minute, and prove the numbers."""
    check_writable(report)
    begun = time.perf_counter()
    with narrate() as narrator:
        quiet_torch()
        from overspill.report.demo import demo_page
        from overspill.runtime.options import Options

        from .train import run_training

        # Train twice, within the budget and by plain PyTorch.
        job = Job(NamedModel(MODEL), BATCH, OPTIMIZER)
        narrator.now(f"capturing and planning {MODEL}")
        with _one_thread():
            trained = run_training(job, Options(BUDGET, store="host"), narrator, steps=STEPS, device="cpu", check=True)
        page = report or Path(tempfile.mkdtemp(prefix="overspill-"), "demo.html")
        _write_page(trained, page)
    # Open the page for who can look at it.
    if not (no_open or json) and _has_display():
        webbrowser.open(page.absolute().as_uri())
    seconds = time.perf_counter() - begun
    complaint = "" if trained.identical else f"not identical to plain PyTorch: {trained.difference}"
    shown = demo_page(trained, page, seconds)
    return of_page(_answer(trained, page, seconds), shown, {}, int(bool(complaint)), complaint)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Yield a context with one thread for compute.

    Where other programs use the cores, threads that wait for each other are far slower.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_page(trained: Trained, path: Path) -> None:
    """Write the report page of the run."""
    from overspill.report.page import write_page
    from overspill.report.training import training_page

    title = f"{MODEL}, batch {BATCH}, {OPTIMIZER}, as overspill demo trained it"
    write_page(path, training_page(trained, title))


def _has_display() -> bool:
    """Return whether a reader can look at a page here."""
    if not sys.stdout.isatty():
        return False
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _answer(trained: Trained, page: Path, seconds: float) -> dict[str, Any]:
    run, reference = trained.managed, trained.reference
    assert reference is not None
    return {
        "model": MODEL,
        "batch": BATCH,
        "optimizer": OPTIMIZER,
        "steps": STEPS,
        "budget_bytes": trained.plan.asked_bytes,
        "measured_peak_bytes": run.measured_peak_bytes,
        "reference_peak_bytes": reference.measured_peak_bytes,
        "offloaded_bytes": run.offloaded_bytes,
        "recomputed_ops": trained.plan.recomputed_ops,
        "losses": run.losses,
        "reference_losses": reference.losses,
        "identical": trained.identical,
        "step_seconds": run.step_seconds,
        "reference_step_seconds": reference.step_seconds,
        "report": str(page),
        "seconds": seconds,
    }
