"""Overspill's estimate beside torch's own MemTracker, on jobs measured on real GPUs; both in one process.

    python bench/estimate_vs_memtracker.py [--models TEXT] [--all-rows] [--json FILE]

MemTracker follows fake tensors on the CPU (`torch.distributed._tools.mem_tracker`), which is how it works without a
GPU; it counts live tensors and knows no allocator, so that its figure is the peak of live bytes. By default one row a
model. `bench/ground_truth/README.md` says what must be installed beside.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from ground_truth import jobs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.capture.virtual_gpu.record import record
from overspill.core.units import format_bytes
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.estimation import Estimate

_GPUS = {"NVIDIA GeForce RTX 3060": "rtx3060", "NVIDIA GeForce RTX 4060": "rtx4060"}


@dataclass(frozen=True)
class Result:
    """One job: what was measured, and what either tool says in how many seconds; errors are shares of the measured."""

    job: str
    measured_bytes: int
    overspill_bytes: int
    memtracker_bytes: int
    overspill_seconds: float
    memtracker_seconds: float

    def error(self, tool: str) -> float:
        """By how much `tool` is off."""
        predicted = self.overspill_bytes if tool == "overspill" else self.memtracker_bytes
        return predicted / self.measured_bytes - 1

    def seconds(self, tool: str) -> float:
        """How long `tool` took."""
        return self.overspill_seconds if tool == "overspill" else self.memtracker_seconds


def overspill(row: jobs.Row) -> tuple[int, float]:
    """The predicted bytes, kernels that are loaded while running included, and the seconds that took."""
    device = load_device(_GPUS[row.gpu])
    started = time.perf_counter()
    recording = record(
        lambda recorder: jobs.run(row, "cuda", jobs.ITERATIONS, recorder.start_iteration), capability=(8, 6)
    )
    estimate = Estimate("", recording, device, software=Software("2.6", "12.4", {}))
    predicted = estimate.peak_reserved_bytes + estimate.kernels.central
    return predicted, time.perf_counter() - started


def memtracker(row: jobs.Row) -> tuple[int, float]:
    """The peak of live bytes that MemTracker sees, and the seconds that took."""
    started = time.perf_counter()
    with FakeTensorMode(), jobs.surroundings(row):
        model = jobs.build(row)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            jobs.train(row, model, "cpu", jobs.ITERATIONS, tracker.reset_mod_stats)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return int(peak), time.perf_counter() - started


def main(
    models: Annotated[str, typer.Option(help="Only models with this in their name.")] = "",
    all_rows: Annotated[bool, typer.Option("--all-rows", help="Every row, not one a model.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Save results there.")] = None,
) -> None:
    """Print both errors and both times of every row."""
    FastFakeMode()  # imports are no part of the times
    rows = [row for row in jobs.load() if not row.real_oom and models in row.model]
    if not all_rows:
        rows = list({row.model: row for row in rows}.values())
    results: list[Result] = []
    for row in rows:
        memtracker_bytes, memtracker_seconds = memtracker(row)
        overspill_bytes, overspill_seconds = overspill(row)
        result = Result(
            f"{row.model} {row.optimizer} {row.batch_size}", row.ground_bytes, overspill_bytes, memtracker_bytes,
            overspill_seconds, memtracker_seconds,
        )  # fmt: skip
        results.append(result)
        print(
            f"{result.job:36} measured {format_bytes(row.ground_bytes):>9}  overspill {result.error('overspill'):+7.1%} "
            f"{overspill_seconds:5.1f} s   MemTracker {result.error('memtracker'):+7.1%} {memtracker_seconds:5.1f} s",
            flush=True,
        )
    for tool in ("overspill", "memtracker"):
        errors = [abs(result.error(tool)) for result in results]
        print(
            f"{tool}: median error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, "
            f"largest {max(errors):.1%}; median {statistics.median(result.seconds(tool) for result in results):.2f} s"
        )
    worse = [result.job for result in results if abs(result.error("overspill")) > abs(result.error("memtracker"))]
    ratio = statistics.median(result.overspill_seconds / result.memtracker_seconds for result in results)
    print(f"less accurate than MemTracker on {len(worse)} of {len(results)} {worse}; time ratio {ratio:.2f}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
