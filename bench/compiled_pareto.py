"""Peak against step time under torch.compile: its own `activation_memory_budget` alone, and Overspill's plans, simulated.

    python bench/compiled_pareto.py [--models gpt2,unet,…] [--device a100-40gb] [--batch 8] [--out FILE]
    python bench/compiled_pareto.py --read bench/results/compiled_pareto.json

For each value of the setting Inductor's programs are made here (small configurations, on the CPU), and simulated on the
device with nothing moved: their peaks and times, without those that another one beats in both, are what torch.compile
offers. Overspill plans at each of these peaks, and then looks for the smallest budget at which it is as fast. Both
columns of times and of bytes are simulated. About a minute a model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from paired import json_record

from overspill.capture.compiled.graph import Captured
from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes, format_seconds
from overspill.devices import load_device
from overspill.models import load, names, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.account import Account
from overspill.plans.fit import search
from overspill.plans.plan import Plan, make_plan
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options

RESULTS = Path(__file__).parent / "results" / "compiled_pareto.json"
STEPS = 6
"""How often the range of budgets is halved in search of the smallest that is as fast."""


class Recording(Session):
    """Keeps the programs of a model by all partitions."""

    programs: tuple[Captured, ...] = ()

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; then has the other programs made."""
        found = super().plan(*args, **kwargs)
        self.programs = tuple(found[0])
        return found


def partitions_of(model: str, batch: int) -> tuple[Captured, ...]:
    """The programs of a training step of the model's small configuration, with momentum."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    job = load(model, small=True)
    step = TrainingStep(job)
    optimizer = optimizer_named("momentum")(step.parameters())
    session = Recording(Options(backend="inductor"))
    session.watch(step, optimizer)
    compile_in(session, step, fullgraph=True)(*job.make_batch(batch))
    session.close()
    return session.programs


def hull(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other one beats in bytes and seconds, from the largest."""
    kept: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["peak_bytes"], p["seconds"])):
        if not kept or point["seconds"] < kept[-1]["seconds"]:
            kept.append(point)
    return kept[::-1]


def chosen(partitions: tuple[Captured, ...], device: Device, budget: int) -> tuple[Plan, float | None]:
    """What Overspill does at a budget: the plan, and the partition that it is of."""
    among = Partitioned(partitions)
    found = among.best_plan(lambda one: search(one.graph, Account(device), "auto", budget))
    return found, among.of(found.graph).partition


def compared(model: str, batch: int, device_name: str) -> dict[str, Any]:
    """One model's rows."""
    device = load_device(device_name)

    def plan(graph: Graph, budget: int) -> Plan:
        return make_plan(graph, device, "auto", budget)

    partitions = partitions_of(model, batch)
    points = []
    for captured in partitions:
        free = plan(captured.graph, device.usable_bytes)
        points.append(
            {"partition": captured.partition, "peak_bytes": free.unmanaged_peak_bytes, "seconds": free.in_core_seconds}
        )  # fmt: skip
    rows = []
    for point in hull(points):
        found, by = chosen(partitions, device, point["peak_bytes"])
        low, high = 0, point["peak_bytes"] + 1  # as fast at `high`, if at all
        if found.step_seconds > point["seconds"]:
            low = high
        for _ in range(STEPS if low < high else 0):
            middle = (low + high) // 2
            try:
                fast = chosen(partitions, device, middle)[0].step_seconds <= point["seconds"]
            except InfeasibleBudgetError:
                fast = False
            low, high = (low, middle) if fast else (middle, high)
        rows.append(
            point | {"overspill_seconds": found.step_seconds, "overspill_partition": by, "overspill_peak_bytes": high - 1}
        )  # fmt: skip
    return {"model": model, "rows": rows}


def table(record: dict[str, Any]) -> str:
    """Markdown: a line a point of torch.compile's hull."""
    lines = [
        f"Simulated on {record['simulated_device']}, small configurations at batch {record['batch']}, momentum:",
        "",
        "| model | `activation_memory_budget` | its peak | its step | Overspill's step within that peak | Overspill's peak at that step |",
        "|---|---|---|---|---|---|",
    ]
    worse, better, count = 0, 0, sum(len(found["rows"]) for found in record["models"])
    for found in record["models"]:
        least = 1.0
        for row in found["rows"]:
            time, peak = row["overspill_seconds"] / row["seconds"], row["overspill_peak_bytes"] / row["peak_bytes"]
            worse += time > 1.0
            least = min(least, time, peak)
            lines.append(
                f"| {found['model']} | {row['partition']:g} | {format_bytes(row['peak_bytes'])} | "
                f"{format_seconds(row['seconds'])} | {time:.3f} | {peak:.3f} |"
            )
        better += least < 0.999
    lines += [
        "",
        f"Slower at {worse} of {count} points; better somewhere for {better} of {len(record['models'])} models.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Compare model by model, record, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(names()))
    parser.add_argument("--device", default="a100-40gb")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    asked = parser.parse_args()
    if asked.read is not None:
        print(table(json.loads(asked.read.read_text())))
        return
    torch.set_num_threads(1)
    found: dict[str, Any] = {"simulated_device": asked.device, "batch": asked.batch, "models": []}
    for model in asked.models.split(","):
        found["models"].append(compared(model, asked.batch, asked.device))
        asked.out.write_text(json_record(torch.device("cpu"), **found))
        print(*table(found | {"models": found["models"][-1:]}).splitlines()[4:-2], sep="\n", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
