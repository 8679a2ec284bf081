"""How close to the lower bound, and how fast, the default solver places traces of training steps; beside omnimalloc.

    python bench/placement.py [--blocks 2000 10000 50000] [--families gpt unet] [--csv FILE...] [--command] [--alone] [--json FILE]

    python bench/placement.py --models all [--policies all] [--batch 8] [--alone] [--json FILE]

The traces are those of bench/traces.py, files with the columns id, lower, upper and size, or the steps of built-in models
under policies (each within half of what it takes unmanaged, or what the policy can do without a budget). Both solvers run one after
the other in this process. Seconds are CPU seconds of all threads, from arrays (omnimalloc: from its own objects) to
offsets; `whole` is from the trace to a validated layout. The ratio is omnimalloc's seconds over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar

import omnimalloc
from traces import FAMILIES, training_trace

from overspill import models
from overspill.core import Trace
from overspill.core.errors import InfeasibleBudget
from overspill.costs import with_algorithms
from overspill.devices import load_device
from overspill.placement.packing.base import LEAST_GAIN, Limits
from overspill.placement.packing.files import read_trace
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.portfolio import Portfolio
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES, policy_named
from overspill.runtime.training import Training, step_graph
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
        graph = with_algorithms(step_graph(Training(partial(models.load, name), batch)), device)
        half = unmanaged_peak(graph, device) // 2
        for policy in policies:
            chosen = policy_named(policy)
            try:
                schedule = chosen.plan(graph, device, half if chosen.plans_for_budget else None)
            except InfeasibleBudget as error:
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
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
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
    if arguments.json:
        record = {
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "date": datetime.now(UTC).date().isoformat(),
            "command": sys.argv,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
