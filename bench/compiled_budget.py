"""The price of a budget under torch.compile, on the CPU: step times with Inductor's kernels within a budget over stock's.

    python bench/compiled_budget.py [--models resnet50,unet,gpt2,bert-base] [--rounds 5] [--out FILE]
    python bench/compiled_budget.py --read FILE

Budgets are shares of what the compiled step takes unmanaged, and the smallest that works, with the host store. Eager
PyTorch, stock torch.compile and each budget have a process of their own and take steps in turn; ratios are taken round by
round. `compile/eager` says what torch.compile gains in the first place. What compiling takes is told of the first budget,
which like stock torch.compile finds an empty cache; the others find what the first has compiled. Five to fifteen minutes
a model on two cores that have nothing else to do, and 20 GiB of memory; rows of models that are not asked for stay in FILE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from paired import Case, Side, json_record, pairs_of, steps_in_turn

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.runtime.options import Options

CASES = {
    "resnet50": Case("resnet50", 8),
    "unet": Case("unet", 3),
    "gpt2": Case("gpt2", 8, seq_len=256),
    "bert-base": Case("bert-base", 12, seq_len=128),
}
"""Batches of which half is enough: weights and gradients, which stay, are less than that."""
BUDGETS = ("100%", "75%", "50%", "smallest")
WARMUP = 2
"""Rounds that do not count: the first compiles, and the store is first touched."""

Row = dict[str, object]


def main() -> None:
    """Run the cases and record them, each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placement", choices=("planned",))
    parser.add_argument("--small", action="store_true", help="the models' small configurations, for a quick look")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compiled_budget.json")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a record, and run nothing")
    arguments = parser.parse_args()
    if arguments.read:
        print_table(json.loads(arguments.read.read_text())["rows"])
        return
    device = torch.device("cpu")
    names = arguments.models.split(",")
    earlier = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows: list[Row] = [row for row in earlier if row["model"] not in names]
    for name in names:
        case = Case(name, 8, small=True) if arguments.small else CASES[name]
        options = {
            budget: Options(budget, store="host", backend="inductor", placement=arguments.placement)
            for budget in arguments.budgets.split(",")
        }
        rows += measure(case, options, device, arguments.rounds)
        arguments.out.write_text(json_record(device, rows=rows))


def measure(case: Case, options: dict[str, Options], device: torch.device, rounds: int) -> list[Row]:
    """A row for torch.compile over eager, and one for each budget over torch.compile; printed as well."""
    about: Row = {"model": case.model, "batch": case.batch}
    rows: list[Row] = []
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overspill-bench-")))
        plain = [stack.enter_context(Side(case, None, device, compiled=compiled)) for compiled in (False, True)]
        managed: dict[str, Side] = {}
        begun: dict[str, tuple[float, float]] = {}
        for budget, asked in options.items():
            side = stack.enter_context(Side(case, asked, device, cache=cache))
            try:
                begun[budget] = side.step(0)  # compiles; an infeasible budget is refused here
                managed[budget] = side
            except InfeasibleBudget as refusal:
                rows.append(about | {"budget": budget, "feasible": False, "floor_bytes": refusal.floor_bytes})
        first = steps_in_turn(plain, 1)
        steps = steps_in_turn([*plain, *managed.values()], WARMUP - 1 + rounds, first_seed=1)
        eager, compiled = (a + b for a, b in zip(first, steps, strict=False))
        ratios = [b[0] / a[0] for a, b in zip(eager[WARMUP:], compiled[WARMUP:], strict=True)]
        rows.insert(0, about | {"budget": None, "measured_compiled_over_eager": ratios})
        for (budget, side), taken in zip(managed.items(), steps[len(plain) :], strict=True):
            pairs = pairs_of(compiled, [begun[budget], *taken], side.plan(), WARMUP)
            found = pairs.summary()
            if budget != next(iter(options)):
                del found["plain_first_step_seconds"], found["managed_first_step_seconds"]
            rows.append(about | {"budget": budget, "store": "host"} | found)
    for row in rows:
        print(describe(row), flush=True)
    return rows


def describe(row: Row) -> str:
    """One line on one row."""
    start = f"{row['model']!s:10s} {row['budget'] or '':9s}"
    if row["budget"] is None:
        ratios: list[float] = row["measured_compiled_over_eager"]  # type: ignore[assignment]
        return f"{start} compile/eager {statistics.median(ratios):.2f}"
    if "floor_bytes" in row:
        return f"{start} infeasible: the floor is {format_bytes(int(str(row['floor_bytes'])))}"
    plan, whole = int(str(row["planned_peak_bytes"])), int(str(row["unmanaged_peak_bytes"]))
    compiling = ""
    if "plain_first_step_seconds" in row:
        compiling = f", of the first steps {first_steps(row):.2f}"
    return (
        f"{start} plan {format_bytes(plan)} of {format_bytes(whole)}: "
        f"measured step time over torch.compile's {row['measured_ratio_median']:.2f} "
        f"({row['measured_ratio_min']:.2f} to {row['measured_ratio_max']:.2f}){compiling}"
    )


def print_table(rows: list[Row]) -> None:
    """The rows as they stand in docs/compiled.md."""
    print("| job | budget | plan / unmanaged | moved a step | measured step over torch.compile's | first step |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        case = f"| {row['model']}, batch {row['batch']} | {row['budget']} |"
        if row["budget"] is None:
            continue
        if "floor_bytes" in row:
            print(f"{case} infeasible: the floor is {format_bytes(int(str(row['floor_bytes'])))} | | | |")
            continue
        plan, whole, moved = (
            format_bytes(int(str(row[key])))
            for key in ("planned_peak_bytes", "unmanaged_peak_bytes", "offloaded_bytes")
        )
        first = f"{first_steps(row):.2f}" if "plain_first_step_seconds" in row else ""
        measured = (
            f"{row['measured_ratio_median']:.2f} ({row['measured_ratio_min']:.2f} to {row['measured_ratio_max']:.2f})"
        )
        print(f"{case} {plan} / {whole} | {moved} | {measured} | {first} |")


def first_steps(row: Row) -> float:
    """The first step within a budget over that of torch.compile, both from an empty cache."""
    return float(str(row["managed_first_step_seconds"])) / float(str(row["plain_first_step_seconds"]))


if __name__ == "__main__":
    main()
