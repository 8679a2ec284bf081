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
    """Print one row for each job and budget, host and disk store side by side."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
    print("| job | budget | plan / unmanaged | moved a step | host store | disk store |")
    print("|---|---|---|---|---|---|")
    for host in (row for row in rows if row["store"] == "host"):
        disk = next(
            r for r in rows if r["store"] == "disk" and (r["model"], r["budget"]) == (host["model"], host["budget"])
        )
        job = f"{host['model']}, batch {host['batch']}"
        if not host.get("feasible", True):
            print(f"| {job} | {host['budget']} | infeasible: the floor is {format_bytes(host['floor_bytes'])} | | | |")
            continue
        peak = f"{format_bytes(host['planned_peak_bytes'])} / {format_bytes(host['unmanaged_peak_bytes'])}"
        moved = format_bytes(host["offloaded_bytes"])
        print(f"| {job} | {host['budget']} | {peak} | {moved} | {_ratio(host)} | {_ratio(disk)} |")


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["measured_ratio_min"], row["measured_ratio_max"]
    return f"{row['measured_ratio_median']:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
