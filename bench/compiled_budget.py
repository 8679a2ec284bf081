"""The price of a budget under torch.compile, on the CPU: step times with Inductor's kernels within a budget over stock's.

    python bench/compiled_budget.py [--models resnet50,unet,gpt2,bert-base] [--pairs 5] [--out FILE]

Budgets are shares of what the compiled step takes unmanaged, and the smallest that works, with the host store. Each side
has a process and a compile cache of its own and they take steps in turn. `compile/eager` says what torch.compile gains in
the first place. The first pair, in which both compile, is told apart. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from paired import Case, compare, compiled_ratios, json_record

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.runtime.options import Options

CASES = {
    "resnet50": Case("resnet50", 8),
    "unet": Case("unet", 1),
    "gpt2": Case("gpt2", 2, seq_len=256),
    "bert-base": Case("bert-base", 4, seq_len=128),
}
BUDGETS = ("100%", "75%", "50%", "smallest")


def main() -> None:
    """Run the cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--placement", choices=("planned",))
    parser.add_argument("--small", action="store_true", help="the models' small configurations, for a quick look")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compiled_budget.json")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    rows = []
    for name in arguments.models.split(","):
        case = Case(name, 8, small=True) if arguments.small else CASES[name]
        ratios = compiled_ratios(case, device, arguments.pairs)
        rows.append({"model": name, "batch": case.batch, "budget": None, "measured_compiled_over_eager": ratios})
        print(f"{name:10s} compile/eager {statistics.median(ratios):.2f}", flush=True)
        for budget in arguments.budgets.split(","):
            options = Options(budget, store="host", backend="inductor", placement=arguments.placement)
            row: dict[str, object] = {"model": name, "batch": case.batch, "budget": budget, "store": "host"}
            try:
                row |= compare(case, options, device, arguments.pairs).summary()
                print(describe(row), flush=True)
            except InfeasibleBudget as refusal:
                row |= {"feasible": False, "floor_bytes": refusal.floor_bytes}
                print(
                    f"{name:10s} {budget:9s} infeasible: the floor is {format_bytes(refusal.floor_bytes)}", flush=True
                )
            rows.append(row)
    arguments.out.write_text(json_record(device, rows=rows))


def describe(row: dict[str, object]) -> str:
    """One line on one case."""
    plan, whole = int(str(row["planned_peak_bytes"])), int(str(row["unmanaged_peak_bytes"]))
    first = float(str(row["managed_first_step_seconds"])) / float(str(row["plain_first_step_seconds"]))
    return (
        f"{row['model']!s:10s} {row['budget']!s:9s} plan {format_bytes(plan)} of {format_bytes(whole)}: "
        f"measured step time over torch.compile's {row['measured_ratio_median']:.2f} "
        f"({row['measured_ratio_min']:.2f} to {row['measured_ratio_max']:.2f}), of the first steps {first:.2f}"
    )


if __name__ == "__main__":
    main()
