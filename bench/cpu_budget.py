"""The price of a budget on the CPU: paired ratios of step times, budgeted over plain, for three jobs.

    python bench/cpu_budget.py [--models resnet50,vgg16-vdnn,gpt2] [--pairs 3] [--out FILE]

Budgets are 75 %, 50 % and the smallest that works, each with the disk and the host store. Prints one line a case and
writes all figures as JSON; rows of models that are not asked for stay in FILE. A full run takes about half an hour on two
cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from paired import Case, compare, json_record

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.models import load
from overspill.runtime.options import Options
from overspill.runtime.training import Training, preview

CASES = {
    "resnet50": Case("resnet50", 32),
    "vgg16-vdnn": Case("vgg16-vdnn", 16),
    "gpt2": Case("gpt2", 4, seq_len=512),
}


def floor_and_peak(case: Case) -> tuple[int, int]:
    """The smallest budget that works, and what the step takes without one, in bytes."""
    training = Training(lambda: load(case.model, small=case.small, seq_len=case.seq_len), case.batch)
    smallest = preview(training, Options(budget="smallest"))
    return smallest.peak_bytes, smallest.unmanaged_peak_bytes


def main() -> None:
    """Run the cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--stores", default="host,disk")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_budget.json")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    names = arguments.models.split(",")
    earlier = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = [row for row in earlier if row["model"] not in names]
    for name in names:
        case = CASES[name]
        budgets: dict[str, str | int] = {"75%": "0.75", "50%": "0.5", "smallest": floor_and_peak(case)[0]}
        for label, budget in budgets.items():
            for store in arguments.stores.split(","):
                row: dict[str, object] = {"model": name, "batch": case.batch, "budget": label, "store": store}
                try:
                    row |= compare(case, Options(budget=budget, store=store), device, arguments.pairs).summary()
                    print(describe(row), flush=True)
                except InfeasibleBudget as refusal:
                    row |= {"feasible": False, "floor_bytes": refusal.floor_bytes}
                    print(
                        f"{name:9s} {label:9s} {store:5s} infeasible: the floor is {format_bytes(refusal.floor_bytes)}"
                    )
                rows.append(row)
                arguments.out.write_text(json_record(device, rows=rows))  # after each row: a full run is long


def describe(row: dict[str, object]) -> str:
    """One case as one line."""
    return (
        f"{row['model']:10s} {row['budget']:9s} {row['store']:5s} "
        f"peak {format_bytes(row['planned_peak_bytes'])} of {format_bytes(row['unmanaged_peak_bytes'])}, "  # type: ignore[arg-type]
        f"moves {format_bytes(row['offloaded_bytes'])}, recomputes {row['recomputed_ops']} ops: "  # type: ignore[arg-type]
        f"measured ratio {row['measured_ratio_median']:.3f} "
        f"({row['measured_ratio_min']:.3f} to {row['measured_ratio_max']:.3f}), simulated {row['simulated_slowdown']:.3f}, "
        f"identical {row['losses_identical']}"
    )


if __name__ == "__main__":
    main()
