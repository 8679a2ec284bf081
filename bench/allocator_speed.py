"""How many allocations and frees a second each allocator replays, native and in Python, in one process.

    python bench/allocator_speed.py [--events 1000000] [--repeats 3] [--json FILE]

Two workloads: `training`, steps of a network whose forward pass keeps activations and whose backward pass frees them in
reverse, with short-lived temporaries between; and `random`, blocks of any size freed in any order. The best of the
repeats counts; Python replays a twentieth of the events. That of gtbm is of two runs: the first one sizes its pool.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from overspill.core.units import format_bytes
from overspill.placement import ALLOCATE, ALLOCATORS, FREE, Events, replay

Row = tuple[int, int, int, int]
LAYERS = 60


class Result(TypedDict):
    """One line of the table."""

    allocator: str
    workload: str
    events: int
    native_events_per_second: float
    python_events_per_second: float
    peak_reserved_bytes: int


def training_events(count: int) -> Events:
    """About `count` events of training steps: a layer keeps one activation and has a gradient and two temporaries."""
    r = random.Random(0)
    sizes = [int(2 ** r.uniform(12, 26)) for _ in range(LAYERS)]
    rows: list[Row] = []
    block = 0
    while len(rows) < count:
        kept: list[int] = []
        for nbytes in sizes:
            rows += [(ALLOCATE, block, nbytes // 4 + 1, 0), (ALLOCATE, block + 1, nbytes, 0), (FREE, block, 0, 0)]
            kept.append(block + 1)
            block += 2
        for nbytes in reversed(sizes):
            rows += [(ALLOCATE, block, nbytes // 4 + 1, 0), (ALLOCATE, block + 1, nbytes, 0)]
            rows += [(FREE, b, 0, 0) for b in (block, kept.pop(), block + 1)]
            block += 2
    return Events.from_rows(rows)


def random_events(count: int) -> Events:
    """`count` events of blocks of 256 bytes to 16 MiB, freed in any order."""
    r = random.Random(0)
    rows: list[Row] = []
    live: list[int] = []
    for i in range(count):
        if live and r.random() < 0.5:
            rows.append((FREE, live.pop(r.randrange(len(live))), 0, 0))
        else:
            rows.append((ALLOCATE, i, int(2 ** r.uniform(8, 24)), 0))
            live.append(i)
    return Events.from_rows(rows)


def events_per_second(events: Events, allocator: str, repeats: int, *, native: bool) -> float:
    """The speed of the fastest replay."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        replay(events, allocator, native=native)
        seconds.append(time.perf_counter() - start)
    return len(events) / min(seconds)


def measure(count: int, repeats: int) -> list[Result]:
    """One result for each workload and allocator."""
    results: list[Result] = []
    for workload, make in (("training", training_events), ("random", random_events)):
        events, fewer = make(count), make(count // 20)
        results += [
            Result(
                allocator=name,
                workload=workload,
                events=len(events),
                native_events_per_second=events_per_second(events, name, repeats, native=True),
                python_events_per_second=events_per_second(fewer, name, repeats, native=False),
                peak_reserved_bytes=replay(events, name).peak_reserved_bytes,
            )
            for name in ALLOCATORS
        ]
    return results


def main() -> None:
    """Measure, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.events, arguments.repeats)
    print(
        f"{'workload':9s} {'allocator':11s} {'native':>10s} {'Python':>10s} {'ratio':>6s}  {'reserved':>9s}   events/s"
    )
    for row in results:
        native, python = row["native_events_per_second"], row["python_events_per_second"]
        print(
            f"{row['workload']:9s} {row['allocator']:11s} {native:10,.0f} {python:10,.0f} {native / python:6.1f}"
            f"  {format_bytes(row['peak_reserved_bytes']):>9s}"
        )
    if arguments.json:
        record = {
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "date": datetime.now(UTC).date().isoformat(),
            "command": sys.argv,
            "rows": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
