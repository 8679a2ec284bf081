"""How close to the lower bound, and how fast, the default solver places traces of training steps; beside omnimalloc.

    python bench/placement.py [--blocks 2000 10000 50000] [--families gpt unet] [--csv FILE...] [--command] [--alone] [--json FILE]

    python bench/placement.py --models all [--policies all] [--batch 8] [--alone] [--json FILE]
    python bench/placement.py --exact bench/instances [--seeds 5] [--seconds 60] [--minimise] [--json FILE]
    python bench/placement.py --tilings 500 1000 2000 5000 [--limits 1 10] [--seeds 3] [--json FILE]

The traces are those of bench/traces.py, files with the columns id, lower, upper and size, or the steps of built-in models
under policies (each within half of what it takes unmanaged, or what the policy can do without a budget). Both solvers run one after
the other in this process. Seconds are CPU seconds of all threads, from arrays (omnimalloc: from its own objects) to
offsets; `whole` is from the trace to a validated layout. The ratio is omnimalloc's seconds over ours.

`--exact` has the exact solver place instances that are hard at their capacity: CSV files as minimalloc has them, the capacity in
the name: `A.1048576.csv`. Every seed also shuffles the rows. CPU seconds are of this process, the preparation included, and of
the worst seed, as are the nodes. `--minimise` also searches for the lowest peak, with the first seed.

`--tilings` gives the default solver perfect tilings (bench/tilings.py) of so many blocks, whose optimum is the most live
bytes, and ragged ones, whose blocks are up to 3 % smaller at each end; under each of the time limits. The peak is the mean
over the seeds, in most live bytes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import omnimalloc
import torch
from paired import json_record
from tilings import ragged, tiling
from traces import FAMILIES, training_trace

from overspill import models
from overspill.core import Layout, Trace
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import with_algorithms
from overspill.devices import load_device
from overspill.job import Job
from overspill.placement.packing.base import LEAST_GAIN, Limits
from overspill.placement.packing.files import read_trace
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.exact import Decider, Exact
from overspill.placement.packing.solvers.portfolio import Portfolio
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES, policy_named
from overspill.runtime.capture_job import step_graph
from overspill.simulate import trace_of

T = TypeVar("T")


class Command(TypedDict):
    """`overspill pack FILE --out FILE` as a whole, its start, reading and writing included."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int


def run_command(trace: Trace) -> Command:
    """What the command takes for the blocks of `trace` as CSV."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = Path(folder) / "blocks.csv"
        rows = (f"b{b.id},{b.start},{b.end},{b.nbytes}\n" for b in trace.blocks)
        blocks.write_text("id,lower,upper,size\n" + "".join(rows), encoding="utf-8")
        program = str(Path(sys.executable).parent / "overspill")
        began = time.perf_counter()
        child = os.spawnv(
            os.P_NOWAIT, program, [program, "pack", str(blocks), "--out", f"{folder}/layout.csv", "--json"]
        )
        _, status, used = os.wait4(child, 0)
        assert status == 0
        return Command(
            cpu_seconds=used.ru_utime + used.ru_stime,
            wall_seconds=time.perf_counter() - began,
            memory_bytes=used.ru_maxrss << 10,
        )


class Row(TypedDict):
    """One trace; gaps are shares of the lower bound, and None where omnimalloc was left out or ran out of memory."""

    trace: str
    blocks: int
    lower_bound_bytes: int
    gap: float
    seconds: float
    whole_seconds: float
    command: Command | None
    omnimalloc_gap: float | None
    omnimalloc_seconds: float | None


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What the work gives, and its CPU seconds."""
    begun = time.process_time()
    result = work()
    return result, time.process_time() - begun


def omnimalloc_peak(trace: Trace) -> tuple[int | None, float]:
    """The peak of omnimalloc's default allocator in bytes (None: it ran out of memory), and its CPU seconds."""
    blocks = tuple(omnimalloc.Allocation(b.id, b.nbytes, b.start, b.end) for b in trace.blocks)
    try:
        pool, seconds = timed(lambda: omnimalloc.allocate(omnimalloc.Pool("trace", blocks)))
    except MemoryError:
        return None, 0.0
    return max((a.offset or 0) + a.size for a in pool.allocations), seconds


def measure(name: str, trace: Trace, limits: Limits, *, alone: bool, command: bool) -> Row:
    """Place one trace with both."""
    problem = Problem.of(trace)
    packing, seconds = timed(lambda: Portfolio().pack(problem, limits))
    solution, whole = timed(lambda: Portfolio().solve(trace, limits))
    bound = problem.lower_bound_bytes
    assert packing.offsets is not None
    assert solution.layout is not None
    peak, other_seconds = (None, 0.0) if alone else omnimalloc_peak(trace)
    return Row(
        trace=name,
        blocks=len(trace.blocks),
        lower_bound_bytes=bound,
        gap=problem.peak_bytes(packing.offsets) / bound - 1,
        seconds=seconds,
        whole_seconds=whole,
        command=run_command(trace) if command else None,
        omnimalloc_gap=None if peak is None else peak / bound - 1,
        omnimalloc_seconds=None if peak is None else other_seconds,
    )


@dataclass
class Instance:
    """One instance; `solved` counts seeds."""

    instance: str
    blocks: int
    lower_bound_bytes: int
    capacity_bytes: int
    seeds: int
    solved: int = 0
    cpu_seconds: float = 0.0
    nodes: int = 0
    peak_bytes: int | None = None
    bound_bytes: int | None = None


def decide(trace: Trace, capacity_bytes: int, seed: int, seconds: float) -> tuple[bool, float, int]:
    """Whether a layout within the capacity was found, and is valid; CPU seconds; nodes."""
    began = time.process_time()
    problem = Problem.of(trace)
    decider = Decider(problem, time.perf_counter() + seconds, seed=seed)
    decision = decider.decide(capacity_bytes)
    cpu_seconds = time.process_time() - began
    if decision.offsets is not None:
        offsets = [0] * len(trace.blocks)
        for position, offset in zip(problem.index.tolist(), decision.offsets.tolist(), strict=True):
            offsets[position] = offset
        Layout("exact", tuple(offsets), problem.peak_bytes(decision.offsets), trace.lower_bound_bytes).validate(trace)
    return decision.offsets is not None, cpu_seconds, decider.nodes


def measure_instance(path: Path, seeds: int, seconds: float, minimise: bool) -> Instance:
    """The instance at `path`, from so many seeds."""
    trace = read_trace(path).trace
    row = Instance(
        path.stem.split(".")[0], len(trace.blocks), trace.lower_bound_bytes, int(path.stem.split(".")[1]), seeds
    )
    for seed in range(seeds):
        blocks = list(trace.blocks)
        random.Random(seed).shuffle(blocks)
        solved, cpu_seconds, nodes = decide(Trace(tuple(blocks)), row.capacity_bytes, seed, seconds)
        row.solved += solved
        row.cpu_seconds, row.nodes = max(row.cpu_seconds, cpu_seconds), max(row.nodes, nodes)
    if minimise:
        best = Exact().solve(trace, Limits(time_limit_seconds=seconds))
        assert best.layout is not None
        row.peak_bytes, row.bound_bytes = best.layout.peak_bytes, best.bound_bytes
    return row


@dataclass
class Tiling:
    """Tilings of so many blocks under one time limit: the mean peak over the most live bytes, and the longest time."""

    blocks: int
    ragged: bool
    limit_seconds: float
    seeds: int
    peak: float
    worst_peak: float
    seconds: float


def measure_tilings(blocks: int, seeds: int, limit: float, *, uneven: bool) -> Tiling:
    """The default solver on so many tilings."""
    peaks, seconds = [], 0.0
    for seed in range(seeds):
        trace = tiling(blocks, seed)
        trace = ragged(trace, seed) if uneven else trace
        found = Portfolio().solve(trace, Limits(time_limit_seconds=limit))
        assert found.layout is not None
        peaks.append(found.layout.peak_bytes / trace.lower_bound_bytes)
        seconds = max(seconds, found.seconds)
    return Tiling(blocks, uneven, limit, seeds, sum(peaks) / seeds, max(peaks), seconds)


def tilings_table(rows: list[Tiling]) -> Iterator[str]:
    """One line a kind, size and limit."""
    yield f"{'blocks':>6s} {'ragged':>6s} {'limit s':>8s} {'peak':>8s} {'worst':>8s} {'s':>7s}"
    for row in rows:
        what = "yes" if row.ragged else ""
        yield (
            f"{row.blocks:6d} {what:>6s} {row.limit_seconds:8g} {row.peak:8.4f} {row.worst_peak:8.4f} {row.seconds:7.2f}"
        )


def instances_table(rows: list[Instance]) -> Iterator[str]:
    """One line an instance, and the sum."""
    yield f"{'instance':10s} {'blocks':>6s} {'bound':>10s} {'capacity':>10s} {'solved':>6s} {'cpu s':>8s} {'nodes':>10s}"
    for row in rows:
        line = (
            f"{row.instance:10s} {row.blocks:6d} {row.lower_bound_bytes:10d} {row.capacity_bytes:10d} "
            f"{row.solved:3d}/{row.seeds:<2d} {row.cpu_seconds:8.4f} {row.nodes:10d}"
        )
        if row.peak_bytes is not None and row.bound_bytes is not None:
            line += f"   peak {row.peak_bytes} ({row.peak_bytes / row.lower_bound_bytes:.4f}), proven {row.bound_bytes}"
        yield line
    yield f"all: {sum(row.cpu_seconds for row in rows):.3f} CPU seconds"


def traces(arguments: argparse.Namespace) -> Iterator[tuple[str, Trace]]:
    """The traces that were asked for, each with its name."""
    if arguments.models:
        names = list(models.names()) if arguments.models == ["all"] else arguments.models
        policies = list(POLICIES) if arguments.policies == ["all"] else arguments.policies
        yield from model_traces(names, policies, arguments.batch)
        return
    if arguments.csv:
        yield from ((path.stem, read_trace(path).trace) for path in arguments.csv)
        return
    for blocks in arguments.blocks:
        for family in arguments.families:
            yield family, training_trace(family, blocks, arguments.seed)


def model_traces(names: list[str], policies: list[str], batch: int) -> Iterator[tuple[str, Trace]]:
    """The steps of built-in models under policies, on an RTX 4090."""
    device = load_device("rtx4090")
    for name in names:
        graph = with_algorithms(step_graph(Job(partial(models.load, name), batch)), device)
        half = unmanaged_peak(graph, device) // 2
        for policy in policies:
            chosen = policy_named(policy)
            try:
                schedule = chosen.plan(graph, device, half if chosen.plans_for_budget else None)
            except InfeasibleBudgetError as error:
                schedule = chosen.plan(graph, device, error.floor_bytes)
            yield f"{name} {policy}", trace_of(graph, schedule)


def line(row: Row) -> str:
    """One line of the table."""
    ours = f"{row['trace']:36s} {row['blocks']:8d} {row['lower_bound_bytes']:16d} {row['gap']:9.4%}"
    ours += f" {row['seconds']:9.4f} {row['whole_seconds']:9.3f}"
    if (command := row["command"]) is not None:
        ours += f"  command: {command['cpu_seconds']:.2f} CPU s, {command['wall_seconds']:.2f} s, "
        ours += f"{command['memory_bytes'] / 2**30:.2f} GiB"
    gap, seconds = row["omnimalloc_gap"], row["omnimalloc_seconds"]
    if gap is None or seconds is None:
        return f"{ours} {'-':>9s} {'-':>10s} {'-':>7s}"
    return f"{ours} {gap:9.4%} {seconds:10.4f} {seconds / row['seconds']:7.1f}"


def main() -> None:
    """Measure, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2000, 10_000, 50_000])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--csv", type=Path, nargs="+")
    parser.add_argument("--models", nargs="+", help="built-in models, or all")
    parser.add_argument("--policies", nargs="+", default=["all"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the traces and of the search")
    parser.add_argument(
        "--time-limit", type=float, help="wall-clock seconds; without it a search ends as it does by default"
    )
    parser.add_argument("--command", action="store_true", help="measure the whole command `overspill pack` too")
    parser.add_argument("--alone", action="store_true", help="leave omnimalloc out")
    parser.add_argument("--exact", type=Path, metavar="FOLDER", help="the exact solver on hard instances instead")
    parser.add_argument("--minimise", "--minimize", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="wall-clock limit of each exact search")
    parser.add_argument(
        "--tilings", type=int, nargs="+", metavar="BLOCKS", help="the default solver on tilings instead"
    )
    parser.add_argument("--limits", type=float, nargs="+", default=[1.0, 10.0], help="of tilings, in seconds")
    parser.add_argument("--seeds", type=int, default=5, help="of instances and tilings")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = _hard(arguments) if arguments.exact or arguments.tilings else _steps(arguments)
    if arguments.json:
        arguments.json.write_text(json_record(torch.device("cpu"), rows=rows))


def _steps(arguments: argparse.Namespace) -> list[Row]:
    """Place traces of training steps, and print a line for each."""
    print(
        f"{'trace':36s} {'blocks':>8s} {'lower bound':>16s} {'gap':>9s} {'seconds':>9s} {'whole':>9s}"
        f" {'omni gap':>9s} {'omni secs':>10s} {'ratio':>7s}"
    )
    limits = Limits(seed=arguments.seed, least_gain=LEAST_GAIN)
    if arguments.time_limit is not None:
        limits = Limits(time_limit_seconds=arguments.time_limit, seed=arguments.seed)
    rows: list[Row] = []
    for name, trace in traces(arguments):
        rows.append(measure(name, trace, limits, alone=arguments.alone, command=arguments.command))
        print(line(rows[-1]), flush=True)
    return rows


def _hard(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Place hard instances, or tilings, and print their table."""
    if arguments.tilings:
        tilings = [
            measure_tilings(blocks, arguments.seeds, limit, uneven=uneven)
            for uneven in (False, True)
            for blocks in arguments.tilings
            for limit in arguments.limits
        ]
        print("\n".join(tilings_table(tilings)))
        return [asdict(row) for row in tilings]
    paths = sorted(arguments.exact.glob("*.csv"))
    if not paths:
        raise SystemExit(f"no CSV files in {arguments.exact}")
    instances = [measure_instance(path, arguments.seeds, arguments.seconds, arguments.minimise) for path in paths]
    print("\n".join(instances_table(instances)))
    return [asdict(row) for row in instances]


if __name__ == "__main__":
    main()
