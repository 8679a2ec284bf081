"""`auto` against every policy of the papers: simulated step times on the same graph, device and budget.

    python bench/policies.py [--models resnet50,…] [--gpus titan-x,…] [--processes 2] [--json FILE]
    python bench/policies.py --read bench/results/policies.json
    python bench/policies.py --papers-from bench/results/policies.json --json bench/results/policies.json
    python bench/policies.py --pools [--models alexnet,…] [--gpus titan-x,…] [--json bench/results/policies_pools.json]

With `--pools` each policy has its own pool, as in `overspill compare --gpu`: budgets are sizes of the card, with
fragmentation, the context and what libraries keep. A plan is then placed many times, so each network has one case: on one
of the GPUs in turn, at the smallest of 50 and 75 % at which a policy of the papers fits. Otherwise live bytes count.
Budgets are 75, 50 and 33 % of what the step takes unmanaged, where any plan can meet them, and the smallest that
`auto` meets. A line for each case gives the slowdown of `auto` and of the best of the papers' policies to the ops' own
time, the proven bound of the step, and how far `auto` is from it. Everything here is simulated; only the planning times
are measured. A full run takes up to an hour on two cores, most of it for the papers' policies; with `--papers-from`
their step times are taken from a record, and all else is planned anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TypedDict

import torch
from paired import json_record

from overspill import models
from overspill.bounds.step_time import lower_bound_seconds
from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds, with_algorithms
from overspill.devices import load_device
from overspill.job import Job
from overspill.planning.algorithms import memory_optimal
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.plans.comparison import compare
from overspill.policies import POLICIES, policy_named
from overspill.runtime.capture_job import step_graph
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.simulate import check, simulate

BATCHES = {
    "alexnet": 256, "overfeat": 128, "vgg16-vdnn": 64, "googlenet": 128, "resnet50": 64, "resnet152": 32,
    "inception-v3": 32, "inception-v4": 32, "inception-resnet-v2": 32, "densenet121": 32, "unet": 16,
    "deeplabv3plus": 8, "pix2pixhd": 1, "gpt2": 8, "bert-base": 32, "lstm": 20,
}  # fmt: skip
GPUS = ("titan-x", "v100", "a100-40gb", "h200", "rtx4090")
SHARES = (0.75, 0.5, 0.33)
POOL_SHARES = (0.5, 0.75)
SMALLEST = "smallest"
LARGE_GAP = 0.15
OURS = "auto"
PAPERS = tuple(name for name, policy in POLICIES.items() if name != OURS and not policy.unlimited)


Recorded = dict[tuple[str, str, int], dict[str, float]]
"""The slowdowns of the papers' policies by model, GPU and budget in bytes."""


class Case(TypedDict):
    """One model, GPU and budget. Slowdowns are to the ops' own time with their fastest algorithms."""

    model: str
    batch: int
    gpu: str
    budget: str
    budget_bytes: int
    unmanaged_peak_bytes: int
    proven_floor_bytes: int
    auto_slowdown: float
    bound_slowdown: float
    gap: float
    best_policy: str | None
    best_slowdown: float | None
    plan_seconds: float
    slowdowns: dict[str, float]


def cases(model: str, batch: int, gpus: list[str], papers: Recorded, *, pools: bool) -> list[Case]:
    """All cases of one model; the papers' policies are not planned where `papers` has them."""
    if pools:
        return [case for gpu in gpus for case in _in_pools(model, batch, gpu)]
    captured = step_graph(Job(lambda: models.load(model), batch))
    return [case for gpu in gpus for case in _on(captured, model, batch, load_device(gpu), papers)]


def _on(captured: Graph, model: str, batch: int, device: Device, papers: Recorded) -> Iterator[Case]:
    graph = with_algorithms(captured, device)
    seconds = op_seconds(graph, device)
    program = StepProgram(graph)
    peak = int(program.live_bytes().max())
    floor = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budgets = {f"{share:.0%}": int(share * peak) for share in SHARES if share * peak > floor}
    for name, budget in (budgets | {SMALLEST: floor}).items():
        begun = time.process_time()
        ours = _slowdown(graph, device, OURS, budget, seconds)
        planned = time.process_time()
        if ours is None:
            raise AssertionError(f"{OURS} does not fit {model} into its own floor of {budget} bytes")
        bound = lower_bound_seconds(graph, device, budget, seconds) / sum(seconds)
        others = papers.get((model, device.name, budget))
        if others is None:
            others = {p: s for p in PAPERS if (s := _slowdown(graph, device, p, budget, seconds)) is not None}
        best = min(others, key=lambda p: others[p], default=None)
        yield {
            "model": model, "batch": batch, "gpu": device.name, "budget": name, "budget_bytes": budget,
            "unmanaged_peak_bytes": peak, "proven_floor_bytes": floor, "auto_slowdown": ours,
            "bound_slowdown": bound, "gap": ours / bound - 1, "best_policy": best,
            "best_slowdown": None if best is None else others[best], "plan_seconds": planned - begun,
            "slowdowns": others,
        }  # fmt: skip


def _in_pools(model: str, batch: int, gpu: str) -> Iterator[Case]:
    """The case of one model on one GPU, each policy in its own pool; none if no policy of the papers fits."""
    job = Job(lambda: models.load(model), batch)
    step = step_of(job, Options(device=load_device(gpu)))
    graph, device, account_for = step.graph, step.account.device, step.accounts(None, None)
    with_fastest = with_algorithms(graph, device)
    seconds = op_seconds(with_fastest, device)
    peak = step.account.unmanaged(graph)
    floor = floor_of(StepProgram(with_fastest).with_algorithms(memory_optimal(with_fastest))).nbytes
    for share in POOL_SHARES:
        budget = int(share * peak)
        # No pool holds a step in less than its live bytes: most of those that do not fit are found at once.
        room = budget - step.account.context_bytes
        able = [p for p in PAPERS if room > 0 and _slowdown(with_fastest, device, p, room, seconds) is not None]
        if not able:
            continue
        rows = {
            row.policy: row for row in compare(graph, device, (OURS, *able), budget, None, None, account_for, step.best)
        }
        slowdowns = {p: s for p in able if rows[p].fits and (s := rows[p].slowdown) is not None}
        if not slowdowns:
            continue
        plan, baseline = rows[OURS].plan, rows[OURS].baseline_seconds
        if plan is None or not rows[OURS].fits:
            raise AssertionError(f"{OURS} does not fit {model} on a card of {budget} bytes, and {[*slowdowns]} do")
        best = min(slowdowns, key=lambda p: slowdowns[p])
        mine, bound = plan.step_seconds / baseline, plan.lower_bound_seconds / baseline
        yield {
            "model": model, "batch": batch, "gpu": device.name, "budget": f"{share:.0%}", "budget_bytes": budget,
            "unmanaged_peak_bytes": peak, "proven_floor_bytes": floor, "auto_slowdown": mine,
            "bound_slowdown": bound, "gap": mine / bound - 1, "best_policy": best,
            "best_slowdown": slowdowns[best], "plan_seconds": plan.plan_seconds,
            "slowdowns": slowdowns,
        }  # fmt: skip
        return


def _slowdown(graph: Graph, device: Device, policy: str, budget_bytes: int, seconds: tuple[float, ...]) -> float | None:
    chosen = policy_named(policy)
    try:
        schedule = chosen.plan(graph, device, budget_bytes if chosen.plans_for_budget else None)
    except InfeasibleBudgetError:
        return None
    if check(graph, schedule).peak_bytes > budget_bytes:
        return None
    return simulate(graph, schedule, device, seconds).step_seconds / sum(seconds)


def spell(case: Case) -> str:
    """The case as a line of the table."""
    best = "-" if case["best_slowdown"] is None else f"{case['best_slowdown']:.3f} {case['best_policy']}"
    return (
        f"{case['model']:20} {case['gpu']:10} {case['budget']:>8} {case['auto_slowdown']:7.3f} "
        f"{case['bound_slowdown']:7.3f} {case['gap']:7.1%} {case['plan_seconds']:6.2f} s  {best}"
    )


def summary(found: list[Case]) -> dict[str, float | int | None]:
    """What the cases come to; the advantage is over the best of the papers' policies, where one fits."""
    met = [c for c in found if c["best_slowdown"] is not None]
    ratios = [(c["best_slowdown"] or 0.0) / c["auto_slowdown"] for c in met]
    gaps = [c["gap"] for c in found]
    return {
        "cases": len(found),
        "cases_that_a_paper_policy_meets": len(met),
        "auto_slower_than_a_paper_policy": sum(r < 1 - 1e-9 for r in ratios),
        "geometric_mean_advantage": statistics.geometric_mean(ratios) if ratios else None,
        "median_gap": statistics.median(gaps),
        "worst_gap": max(gaps),
        "median_gap_above_the_smallest": statistics.median(
            [c["gap"] for c in found if c["budget"] != SMALLEST] or gaps
        ),
        "longest_plan_seconds": max(c["plan_seconds"] for c in found),
        "larger_budget_slower": sum(
            larger["auto_slowdown"] > smaller["auto_slowdown"] * (1 + 1e-9) for larger, smaller in neighbours(found)
        ),
    }


def neighbours(found: list[Case]) -> Iterator[tuple[Case, Case]]:
    """Pairs of cases that differ in the budget alone, the larger first, and none between them."""
    jobs: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in found:
        jobs[case["model"], case["gpu"]].append(case)
    for cases_of_job in jobs.values():
        yield from pairwise(sorted(cases_of_job, key=lambda c: -c["budget_bytes"]))


def spread(gaps: list[float]) -> str:
    """Gaps in short: the median, the worst, and how many are too large."""
    over = sum(gap > LARGE_GAP for gap in gaps)
    return f"median {statistics.median(gaps):.2%}, worst {max(gaps):.1%}, {over} above {LARGE_GAP:.0%}"


def by_budget(found: list[Case]) -> Iterator[str]:
    """A line for each budget: how far our plans are from the bound, and the advantage where a paper's policy fits."""
    for budget in dict.fromkeys(c["budget"] for c in found):
        here = [c for c in found if c["budget"] == budget]
        ratios = [c["best_slowdown"] / c["auto_slowdown"] for c in here if c["best_slowdown"] is not None]
        advantage = f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"
        yield (f"{budget:>8}: {len(here)} cases, advantage {advantage}; gap {spread([c['gap'] for c in here])}")


def recorded(path: Path) -> list[Case]:
    """The cases of a record."""
    found: list[Case] = json.loads(path.read_text())["cases"]
    return found


def run(names: list[str], gpus: list[str], processes: int, papers: Recorded, *, pools: bool) -> Iterator[list[Case]]:
    """Print the cases of these models as they come, and yield those so far."""
    print(f"{'model':20} {'gpu':10} {'budget':>8} {'auto':>7} {'bound':>7} {'gap':>7} {'plan':>8}  best of the papers")
    found: list[Case] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        turns = {name: at % len(gpus) for at, name in enumerate(BATCHES)}
        jobs = [(name, [gpus[turns[name]]] if pools else gpus) for name in names]
        asked = [pool.submit(cases, name, BATCHES[name], on, papers, pools=pools) for name, on in jobs]
        try:
            for done in as_completed(asked):
                found += done.result()
                print("\n".join(map(spell, done.result())), flush=True)
                yield found
        finally:  # after an error none begins
            pool.shutdown(cancel_futures=True)


def main() -> None:
    """Run the cases, print them as they come, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(BATCHES))
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pools", action="store_true", help="each policy in its own pool, on cards")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="a record, whose figures are printed without a run")
    parser.add_argument("--papers-from", type=Path, help="a record, from which the papers' policies are taken")
    arguments = parser.parse_args()
    if arguments.read:
        show(recorded(arguments.read))
        return
    known = recorded(arguments.papers_from) if arguments.papers_from else []
    papers = {(c["model"], c["gpu"], c["budget_bytes"]): c["slowdowns"] for c in known}
    names, gpus, found = arguments.models.split(","), arguments.gpus.split(","), list[Case]()
    note = "step times are simulated; plan_seconds are CPU seconds measured on this machine"
    if arguments.pools:
        note = "each policy in its own pool; step times are simulated; plan_seconds are of the clock, on this machine"
    if arguments.papers_from:
        note += "; the papers' policies are as in the record before"
    for found in run(names, gpus, arguments.processes, papers, pools=arguments.pools):
        if arguments.json:  # of what is known so far, should the run be stopped
            text = json_record(torch.device("cpu"), note=note, summary=summary(found), cases=found)
            arguments.json.write_text(text)
    show(found)
    if arguments.json:
        print(f"recorded in {arguments.json}", file=sys.stderr)


def show(found: list[Case]) -> None:
    """Print what the cases come to, and a line for each budget."""
    for name, value in summary(found).items():
        print(f"{name.replace('_', ' ')}: {value if not isinstance(value, float) else round(value, 4)}")
    print("\n".join(by_budget(found)))


if __name__ == "__main__":
    main()
