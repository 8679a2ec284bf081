"""Prints the README's table of costs from `bench/results/cpu_budget.json`.

python bench/readme_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overspill.core.units import format_bytes

RESULTS = Path(__file__).parent / "results" / "cpu_budget.json"


def main() -> None:
    """Print one row for each case."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
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


if __name__ == "__main__":
    main()
