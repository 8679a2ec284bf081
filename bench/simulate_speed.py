"""How many instructions a second the clocked machine and the reference machine carry out.

    python bench/simulate_speed.py [--model resnet152] [--batch 32] [--gpu titan-x] [--repeats 5] [--json FILE]

Schedules of `vdnn-all` and of `auto` within 60 % of what the step takes unmanaged; the best of the repeats counts.
`check` runs up to the peak twice, to say what is on the device there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypedDict

from overspill import models
from overspill.costs import op_seconds
from overspill.devices import load_device
from overspill.plans.plan import unmanaged_peak
from overspill.policies import policy_named
from overspill.runtime.training import Training, step_graph
from overspill.simulate import check, simulate

WANTED_INSTRUCTIONS_PER_SECOND = 100_000
BUDGET_SHARE = 0.6


class Result(TypedDict):
    """One line of the table."""

    policy: str
    instructions: int
    simulate_instructions_per_second: float
    check_instructions_per_second: float
    plan_seconds: float


def fastest_seconds(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def measure(model: str, batch: int, gpu: str, repeats: int) -> list[Result]:
    """One result for each policy."""
    device = load_device(gpu)
    graph = step_graph(Training(lambda: models.load(model), batch))
    seconds = op_seconds(graph, device)
    budget = int(BUDGET_SHARE * unmanaged_peak(graph, device))
    results: list[Result] = []
    for name in ("vdnn-all", "auto"):
        policy = policy_named(name)
        begun = time.perf_counter()
        schedule = policy.plan(graph, device, budget if policy.plans_for_budget else None)
        planned = time.perf_counter() - begun
        count = len(schedule.instructions)
        simulated = fastest_seconds(partial(simulate, graph, schedule, device, seconds), repeats)
        checked = fastest_seconds(partial(check, graph, schedule), repeats)
        results.append(
            Result(
                policy=name,
                instructions=count,
                simulate_instructions_per_second=count / simulated,
                check_instructions_per_second=count / checked,
                plan_seconds=planned,
            )
        )
    return results


def main() -> int:
    """Measure, print the table, and record it if asked to; 1 where the clocked machine is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet152")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--gpu", default="titan-x")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.model, arguments.batch, arguments.gpu, arguments.repeats)
    print(f"{'policy':10s} {'instructions':>12s} {'simulate':>12s} {'check':>12s} {'planned in':>11s}   instructions/s")
    for row in results:
        print(
            f"{row['policy']:10s} {row['instructions']:12,d} {row['simulate_instructions_per_second']:12,.0f} "
            f"{row['check_instructions_per_second']:12,.0f} {row['plan_seconds']:9.2f} s"
        )
    if arguments.json:
        record = {
            "machine": {"machine": platform.machine(), "python": platform.python_version()},
            "date": datetime.now(UTC).date().isoformat(),
            "command": sys.argv,
            "rows": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    slowest = min(row["simulate_instructions_per_second"] for row in results)
    return int(slowest < WANTED_INSTRUCTIONS_PER_SECOND)


if __name__ == "__main__":
    sys.exit(main())
