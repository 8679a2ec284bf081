"""What recording a run costs: paired ratios of the CPU time and the time of whole steps, recorded over not recorded.

    python bench/recording.py [--models resnet18,gpt2] [--pairs 7] [--out bench/results/recording.json]

One copy of a job takes steps in turn, without a recording and in one; equal steps take equal work. The first step of a
recording, in which graphs are made to tell what they do, does not count, but what that took is told. On one thread.
`--small` takes the small configurations, in which there is least to compute beside it. Prints one line a case, and writes
all figures as JSON where `--out` says. Some eight minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paired import json_record

import overspill
from overspill.core.units import format_seconds
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.report.recording import Recording

BATCHES = {"resnet18": 8, "gpt2": 4}
SEQ_LEN = 256
WAYS = ("compile", "inductor", "train_step")
WARM_UP_STEPS = 2


class Seconds(NamedTuple):
    """How long one step took, on the clock and on all cores."""

    wall: float
    cpu: float


class Job:
    """A job in one of the `WAYS`: `step` takes one step, `source` is what is recorded."""

    def __init__(self, model: str, way: str, budget: str, *, small: bool) -> None:
        torch.manual_seed(0)
        job = load(model, small=small, seq_len=SEQ_LEN if model == "gpt2" and not small else None)
        batch = job.make_batch(8 if small else BATCHES[model])
        step = TrainingStep(job)
        optimizer = optimizer_named("sgd")(step.parameters())
        asked: dict[str, Any] = {"budget": budget, "store": "host"}
        if way == "train_step":
            whole = overspill.train_step(step.model, step.loss, optimizer, **asked)
            self.source: Any = whole
            self.step: Callable[[], Any] = lambda: whole(*batch)
            return
        backend = "inductor" if way == "inductor" else "eager"
        compiled = overspill.compile(step, backend=backend, fullgraph=True, **asked)
        self.source = compiled.overspill

        def one_step() -> None:
            optimizer.zero_grad(set_to_none=True)
            compiled(*batch).backward()
            optimizer.step()

        self.step = one_step

    def timed(self) -> Seconds:
        """One step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def recorded(self) -> tuple[Seconds, Recording]:
        """One step of a recording, behind another in which graphs are made to tell."""
        with overspill.record(self.source) as seen:
            self.step()
            return self.timed(), seen


def compare(model: str, way: str, budget: str, pairs: int, *, small: bool) -> dict[str, Any]:
    """The figures of one case."""
    job = Job(model, way, budget, small=small)
    for _ in range(WARM_UP_STEPS):
        job.step()
    plain, ours, prepared = [], [], []
    for _ in range(pairs):
        plain.append(job.timed())
        seconds, seen = job.recorded()
        ours.append(seconds)
        prepared.append(seen.record.facts[0].prepared_seconds)
    record = seen.record
    job.source.close()
    torch._dynamo.reset()
    cpu = [one.cpu / other.cpu for one, other in zip(ours, plain, strict=True)]
    wall = [one.wall / other.wall for one, other in zip(ours, plain, strict=True)]
    instructions = len(record.within(record.compute, 1))
    found = {
        "model": model, "way": way, "instructions": instructions,
        "changes_of_memory": sum(change.step == 1 for change in record.changes),
        "prepared_seconds": statistics.median(prepared),
        "plain_cpu_seconds": [s.cpu for s in plain], "recorded_cpu_seconds": [s.cpu for s in ours],
        "cpu_ratio_median": statistics.median(cpu), "cpu_ratio_min": min(cpu), "cpu_ratio_max": max(cpu),
        "wall_ratio_median": statistics.median(wall),
    }  # fmt: skip
    if small:  # else the steps differ by more than that among themselves
        found["seconds_an_instruction"] = (min(s.cpu for s in ours) - min(s.cpu for s in plain)) / instructions
    return found


def main() -> None:
    """Run the cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,gpt2")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--budget", default="0.8")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in arguments.models.split(","):
        for way in arguments.ways.split(","):
            row = compare(model, way, arguments.budget, arguments.pairs, small=arguments.small)
            rows.append(row)
            print(
                f"{model:9s} {way:10s} {row['instructions']} instructions: CPU time x {row['cpu_ratio_median']:.3f} "
                f"({row['cpu_ratio_min']:.3f} to {row['cpu_ratio_max']:.3f}), time x {row['wall_ratio_median']:.3f}, "
                f"made ready in {format_seconds(row['prepared_seconds'])}",
                flush=True,
            )
            if arguments.out is not None:
                arguments.out.write_text(json_record(torch.device("cpu"), small=arguments.small, rows=rows))


if __name__ == "__main__":
    main()
