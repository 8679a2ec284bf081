"""What checksums cost: paired ratios of the CPU time and the time of whole steps, with checksums over without.

    python bench/checksum.py [--models resnet18,gpt2] [--pairs 5] [--out bench/results/checksum.json]

Both sides train one model under one budget with the same store, take steps in turn, and must have the same losses.
`--small` takes the small configurations, to try the script. Prints one line a case, and writes all figures as JSON
where `--out` says.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paired import json_record

import overspill
from overspill.core.units import format_bytes
from overspill.models import load, optimizer_named
from overspill.runtime.step.train_step import TrainStep

CASES = {"resnet18": 8, "vgg11": 4, "gpt2": 2}


@dataclass(frozen=True)
class Seconds:
    """How long one step took, on the clock and on all cores."""

    wall: float
    cpu: float


class Side:
    """One copy of a job, trained with checksums or without."""

    def __init__(self, model: str, store: str, budget: str, *, small: bool, checksum: bool) -> None:
        torch.manual_seed(0)
        job = load(model, small=small)
        self.batch = job.make_batch(2 if small else CASES[model])
        optimizer = optimizer_named("adamw")(job.module.parameters())
        self.step: TrainStep = overspill.train_step(
            job.module, job.loss, optimizer, budget=budget, policy="window", store=store, checksum=checksum
        )

    def run(self, seed: int) -> tuple[Seconds, float]:
        """One step; equal seeds give equal dropout."""
        torch.manual_seed(seed)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self.step(*self.batch).item()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu), loss


def compare(model: str, store: str, budget: str, pairs: int, *, small: bool) -> dict[str, Any]:
    """The figures of one case; the first pair, which plans and touches the store first, does not count."""
    sides = [Side(model, store, budget, small=small, checksum=checksum) for checksum in (False, True)]
    taken: list[list[Seconds]] = [[], []]
    identical = True
    for index in range(pairs + 1):
        (plain, plain_loss), (checked, checked_loss) = (side.run(index) for side in sides)
        identical &= plain_loss == checked_loss
        if index:
            taken[0].append(plain)
            taken[1].append(checked)
    (plan,) = sides[0].step.plans
    for side in sides:
        side.step.close()
    cpu = [checked.cpu / plain.cpu for plain, checked in zip(*taken, strict=True)]
    wall = [checked.wall / plain.wall for plain, checked in zip(*taken, strict=True)]
    return {
        "model": model, "store": store, "budget_bytes": plan.budget_bytes,
        "moved_bytes": plan.offloaded_bytes + plan.prefetched_bytes,
        "plain_cpu_seconds": [s.cpu for s in taken[0]], "checked_cpu_seconds": [s.cpu for s in taken[1]],
        "cpu_ratio_median": statistics.median(cpu), "cpu_ratio_min": min(cpu), "cpu_ratio_max": max(cpu),
        "wall_ratio_median": statistics.median(wall), "losses_identical": identical,
    }  # fmt: skip


def main() -> None:
    """Run the cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,gpt2")
    parser.add_argument("--stores", default="host,disk")
    parser.add_argument("--budget", default="0.6")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models.split(","):
        for store in arguments.stores.split(","):
            row = compare(model, store, arguments.budget, arguments.pairs, small=arguments.small)
            rows.append(row)
            print(
                f"{model:9s} {store:5s} moves {format_bytes(row['moved_bytes'])} a step: CPU time x {row['cpu_ratio_median']:.3f} "
                f"({row['cpu_ratio_min']:.3f} to {row['cpu_ratio_max']:.3f}), time x {row['wall_ratio_median']:.3f}, "
                f"identical {row['losses_identical']}",
                flush=True,
            )
            if arguments.out is not None:
                arguments.out.write_text(json_record(torch.device("cpu"), rows=rows))


if __name__ == "__main__":
    main()
