"""The price of a budget on the CPU: step times within a budget over those of eager PyTorch, or of stock torch.compile.

    python bench/price.py eager [--models resnet50,vgg16-vdnn,gpt2] [--rounds 3] [--out FILE]
    python bench/price.py inductor [--models resnet50,unet,gpt2,bert-base] [--rounds 5] [--out FILE]
    python bench/price.py --read FILE

Budgets are shares of what the step takes unmanaged, and the smallest that works. Each side has a process of its own, and all
take steps in turn; ratios are taken round by round. With Inductor's kernels, `compile/eager` says what torch.compile gains in
the first place, and what compiling takes is told of the first budget, which like stock torch.compile finds an empty cache; the
others find what the first has compiled. Five to fifteen minutes a model on two cores that have nothing else to do, and up to
20 GiB of memory; rows of models that are not asked for stay in FILE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from paired import Case, Side, json_record, pairs_of, steps_in_turn

from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes
from overspill.runtime.options import Options

CASES = {
    "eager": (Case("resnet50", 32), Case("vgg16-vdnn", 16), Case("gpt2", 4, seq_len=512)),
    "inductor": (
        Case("resnet50", 8), Case("unet", 3), Case("gpt2", 8, seq_len=256), Case("bert-base", 12, seq_len=128),
    ),
}  # fmt: skip
"""With Inductor's kernels batches of which half is enough: weights and gradients, which stay, are less than that."""
RECORDS = {"eager": "cpu_budget.json", "inductor": "compiled_budget.json"}
BUDGETS = {"eager": "75%,50%,smallest", "inductor": "100%,75%,50%,smallest"}
WARM_UP = 2
"""Rounds that do not count: the first compiles, and the store is first touched."""

Row = dict[str, Any]


def main() -> None:
    """Run the cases and record them, each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", choices=CASES, default="eager")
    parser.add_argument("--models")
    parser.add_argument("--budgets")
    parser.add_argument("--stores", default="host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--placement", choices=("planned",))
    parser.add_argument("--small", action="store_true", help="the models' small configurations, for a quick look")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    asked = parser.parse_args()
    if asked.read:
        print(table(json.loads(asked.read.read_text())["rows"]))
        return
    out = asked.out or Path(__file__).parent / "results" / RECORDS[asked.backend]
    names = asked.models.split(",") if asked.models else [case.model for case in CASES[asked.backend]]
    rows: list[Row] = (
        [r for r in json.loads(out.read_text())["rows"] if r["model"] not in names] if out.exists() else []
    )
    for name in names:
        case = Case(name, 8, small=True) if asked.small else next(c for c in CASES[asked.backend] if c.model == name)
        options = {
            (budget, store): Options(budget, store=store, backend=asked.backend, placement=asked.placement)
            for budget in (asked.budgets or BUDGETS[asked.backend]).split(",")
            for store in asked.stores.split(",")
        }
        rows += measure(case, options, asked.rounds)
        out.write_text(json_record(torch.device("cpu"), rows=rows))
    print(table(rows))


def measure(case: Case, options: dict[tuple[str, str], Options], rounds: int) -> list[Row]:
    """A row for each budget and store, and with Inductor's kernels one for torch.compile over eager; told as they come."""
    about: Row = {"model": case.model, "batch": case.batch}
    device, rows = torch.device("cpu"), []
    inductor = any(asked.backend == "inductor" for asked in options.values())
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overspill-bench-")))
        kinds = (False, True) if inductor else (False,)
        plain = [stack.enter_context(Side(case, None, device, compiled=compiled)) for compiled in kinds]
        managed: dict[tuple[str, str], Side] = {}
        begun: dict[tuple[str, str], tuple[float, float]] = {}
        for way, asked in options.items():
            side = stack.enter_context(Side(case, asked, device, cache=cache))
            try:
                begun[way] = side.step(0)  # compiles; an infeasible budget is refused here
                managed[way] = side
            except InfeasibleBudgetError as refusal:
                rows.append(
                    about | {"budget": way[0], "store": way[1], "feasible": False, "floor_bytes": refusal.floor_bytes}
                )
        first = steps_in_turn(plain, 1)
        steps = steps_in_turn([*plain, *managed.values()], WARM_UP - 1 + rounds, first_seed=1)
        taken = [a + b for a, b in zip(first, steps, strict=False)]
        if inductor:
            ratios = [b[0] / a[0] for a, b in zip(taken[0][WARM_UP:], taken[1][WARM_UP:], strict=True)]
            print(f"{case.model:10s} compile/eager {statistics.median(ratios):.2f}")
            rows.append(about | {"budget": None, "measured_compiled_over_eager": ratios})
        for (way, side), ours in zip(managed.items(), steps[len(plain) :], strict=True):
            found = pairs_of(taken[-1], [begun[way], *ours], side.plan(), WARM_UP).summary()
            if not inductor or way != next(iter(options)):
                del found["plain_first_step_seconds"], found["managed_first_step_seconds"]
            rows.append(about | {"budget": way[0], "store": way[1]} | found)
    print(*table(rows).splitlines()[2:], sep="\n", flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """The rows in Markdown, as they stand in the docs."""
    lines = [
        "| job | budget | store | plan / unmanaged | moved a step | measured step time over plain | first step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["budget"] is None:
            continue
        case = f"| {row['model']}, batch {row['batch']} | {row['budget']} | {row['store']} |"
        if not row.get("feasible", True):
            lines.append(f"{case} infeasible: the floor is {format_bytes(row['floor_bytes'])} | | | |")
            continue
        plan, whole, moved = (
            format_bytes(row[key]) for key in ("planned_peak_bytes", "unmanaged_peak_bytes", "offloaded_bytes")
        )
        low, middle, high = (row[f"measured_ratio_{name}"] for name in ("min", "median", "max"))
        first = ""
        if "plain_first_step_seconds" in row:
            first = f"{row['managed_first_step_seconds'] / row['plain_first_step_seconds']:.2f}"
        lines.append(f"{case} {plan} / {whole} | {moved} | {middle:.2f} ({low:.2f} to {high:.2f}) | {first} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
