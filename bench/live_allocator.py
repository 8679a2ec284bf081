"""How many requests a second the live allocator serves by a plan, beside best fit and PyTorch's caching allocator.

    python bench/live_allocator.py [--requests 10000] [--repeats 100] [--json FILE]

One trace for all: training steps of a network whose forward pass keeps activations and whose backward pass frees them
in reverse. A request is an allocation with its free. `replay` and `best fit` are the live allocator's native core over
simulated memory, under its mutex, the events given to it one by one in C++; `PyTorch` is the native simulation of
PyTorch's caching allocator, which has no mutex. All seconds are of the CPU, the fastest of three runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from allocator_speed import training_events

from overspill.core import Block, Trace
from overspill.placement import ALLOCATE, Events, replay
from overspill.placement.replay import layout_of
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.recorded import ALIGNMENT_BYTES

RUNS = 3


def trace_of_training(requests: int) -> Trace:
    """About `requests` blocks of training steps, in sizes and at addresses that a CUDA device can have."""
    events = training_events(2 * requests)
    open_: dict[int, tuple[int, int]] = {}
    spans: list[tuple[int, int, int]] = []
    rows = zip(events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), strict=True)
    for at, (action, block, nbytes) in enumerate(rows):
        if action == ALLOCATE:
            open_[block] = (at, -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        else:
            start, size = open_.pop(block)
            spans.append((start, at, size))
    spans += [(start, len(events), size) for start, size in open_.values()]
    return Trace(tuple(Block(i, *span, alignment=ALIGNMENT_BYTES) for i, span in enumerate(sorted(spans))))


def live_seconds(trace: Trace, events: Events, repeats: int, *, planned: bool) -> float:
    """CPU seconds of one request in a new allocator, after a first step that finds the memory."""
    allocator = LiveAllocator("simulated")
    if planned:
        allocator.replay(trace, layout_of(trace, "pytorch"))
    arrays = (events.action, events.block, events.nbytes, events.stream, events.block_count)
    allocator._core.drive(*arrays, 1)
    seconds = allocator._core.drive(*arrays, repeats)
    assert allocator.statistics().planned == planned * (1 + repeats) * len(trace.blocks)
    return seconds / (repeats * len(trace.blocks))


def simulated_seconds(trace: Trace, events: Events) -> float:
    """CPU seconds of one request in PyTorch's caching allocator, simulated natively."""
    began = time.process_time()
    replay(events, "pytorch")
    return (time.process_time() - began) / len(trace.blocks)


def main() -> None:
    """Measure, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trace = trace_of_training(arguments.requests)
    events = Events.of(trace)
    measured: dict[str, Callable[[], float]] = {
        "replay": lambda: live_seconds(trace, events, arguments.repeats, planned=True),
        "best fit": lambda: live_seconds(trace, events, arguments.repeats, planned=False),
        "PyTorch": lambda: simulated_seconds(trace, events),
    }
    rates = {name: 1 / min(measure() for _ in range(RUNS)) for name, measure in measured.items()}
    print(f"{len(trace.blocks)} requests a step        requests/s   replay is faster by")
    for name, rate in rates.items():
        print(f"{name:30s} {rate:12,.0f} {rates['replay'] / rate:12.1f}x")
    if arguments.json:
        record = {
            "machine": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "date": datetime.now(UTC).date().isoformat(),
            "command": sys.argv,
            "requests": len(trace.blocks),
            "requests_per_second": rates,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
