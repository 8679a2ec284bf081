"""How fast the exact solver places instances that are hard at their capacity, and how low it gets.

    python bench/hard_placement.py FOLDER [--seeds 5] [--seconds 60] [--minimise] [--json FILE]
    python bench/hard_placement.py --tilings 500 1000 2000 5000 [--limits 1 10] [--seeds 3] [--json FILE]

FOLDER holds CSV files as minimalloc has them (bench/instances), the capacity in the name: `A.1048576.csv`. Every seed
also shuffles the rows. CPU seconds are of this process, the preparation included, and of the worst seed, as are the
nodes. `--minimise` also searches for the lowest peak, with the first seed.

`--tilings` gives the default solver perfect tilings (bench/tilings.py) of so many blocks, whose optimum is the most live
bytes, and ragged ones, whose blocks are up to 3 % smaller at each end; under each of the time limits. The peak is the mean
over the seeds, in most live bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tilings import ragged, tiling

from overspill.core import Layout, Trace
from overspill.placement.packing.base import Limits
from overspill.placement.packing.files import read_trace
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.exact import Decider, Exact
from overspill.placement.packing.solvers.portfolio import Portfolio


@dataclass
class Row:
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


def measure(path: Path, seeds: int, seconds: float, minimise: bool) -> Row:
    """The instance at `path`, from so many seeds."""
    trace = read_trace(path).trace
    row = Row(path.stem.split(".")[0], len(trace.blocks), trace.lower_bound_bytes, int(path.stem.split(".")[1]), seeds)
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


def table(rows: list[Row]) -> Iterator[str]:
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


def main() -> None:
    """Measure, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tilings", type=int, nargs="+", metavar="BLOCKS")
    parser.add_argument("--limits", type=float, nargs="+", default=[1.0, 10.0], help="of tilings, in seconds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="wall-clock limit of each search")
    parser.add_argument("--minimise", "--minimize", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[Row] | list[Tiling]
    if arguments.tilings:
        rows = [
            measure_tilings(blocks, arguments.seeds, limit, uneven=uneven)
            for uneven in (False, True)
            for blocks in arguments.tilings
            for limit in arguments.limits
        ]
        print("\n".join(tilings_table(rows)))
    else:
        paths = sorted(arguments.folder.glob("*.csv")) if arguments.folder else []
        if not paths:
            parser.error(f"no CSV files in {arguments.folder}")
        rows = [measure(path, arguments.seeds, arguments.seconds, arguments.minimise) for path in paths]
        print("\n".join(table(rows)))
    if arguments.json:
        record = {
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "date": datetime.now(UTC).date().isoformat(),
            "command": sys.argv,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
