"""Prints the README's tables: costs from `bench/results/cpu_budget.json`, accuracy from `…/estimate_accuracy.json`.

python bench/readme_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overspill.core.units import format_bytes

RESULTS = Path(__file__).parent / "results"


def costs() -> None:
    """Print one row for each case of a step under a budget."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / "cpu_budget.json").read_text())["rows"]
    print("| job | budget | store | plan / unmanaged | moved a step | measured step time over plain |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        case = f"| {row['model']}, batch {row['batch']} | {row['budget']} | {row['store']} |"
        if not row.get("feasible", True):
            print(f"{case} infeasible: the floor is {format_bytes(row['floor_bytes'])} | | |")
            continue
        peak = f"{format_bytes(row['planned_peak_bytes'])} / {format_bytes(row['unmanaged_peak_bytes'])}"
        ratios = len(row["plain_step_seconds"])
        measured = f"{row['measured_ratio_median']:.2f} ({ratios} pair{'s' if ratios > 1 else ''})"
        print(f"{case} {peak} | {format_bytes(row['offloaded_bytes'])} | {measured} |")


def accuracy() -> None:
    """Print one row for each group of estimates."""
    found = json.loads((RESULTS / "estimate_accuracy.json").read_text())
    print("| estimates of | jobs | median error | mean | 90 % below | largest | bias | in the interval | its width |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found["summaries"]:
        shares = " | ".join(f"{row[name]:.1%}" for name in ("median", "mean", "percentile_90", "largest", "bias"))
        interval = " | ".join("" if row[name] is None else f"{row[name]:.1%}" for name in ("inside", "width"))
        print(f"| {row['rows']} | {row['count']} | {shares} | {interval} |")


if __name__ == "__main__":
    accuracy()
    print()
    costs()
