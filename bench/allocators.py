"""What jobs reserve with the live allocators, beside PyTorch's and its expandable segments; all simulated.

    python bench/allocators.py [--instances bench/instances] [--snapshots FILE.pickle...] [--steps 8] [--json FILE]

A row is a job: weights, then the same step again and again: minimalloc's instances, whose sizes are taken times 512, and traces
of bench/traces.py. `lengths` are the traces with one of five lengths in each step, drawn at random, and `lengths, named` the same
with the end of each step told (`overspill.step`). Snapshots are jobs that somebody recorded.

`beyond` is the peak of reserved bytes over the peak of requested ones, from the first planned address on, in the same
events for all. `chunked` maps memory so often in each 100 events. Requests a second are those of the CPU time of the last half of a job, frees included, with plans in force.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from paired import json_record
from traces import FAMILIES, training_trace

from overspill.placement import CachingConfig, Events, replay
from overspill.placement.allocators.chunked import ChunkedAllocator
from overspill.placement.allocators.native_allocator import NativeAllocator
from overspill.placement.allocators.planned import PlannedAllocator
from overspill.placement.allocators.two_ended import LEARNING, TwoEndedAllocator
from overspill.placement.packing.files import read_trace
from overspill.placement.snapshot import events_of, read_snapshot

MIB = 1 << 20
COLUMNS = ("action", "block", "nbytes", "stream", "mobility")
EXPANDABLE = CachingConfig(expandable_segments=True)


@dataclass(frozen=True)
class Job:
    """Events, and where steps end if the job says so."""

    name: str
    events: Events
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    job: str
    events: int
    planned_share: float
    """Of the requests after the first plan."""
    pytorch: float
    expandable: float
    planned: float
    """Reserved beyond requested, once plans are in force."""
    planned_whole: float
    """Of the whole job, its profile included."""
    chunked: float
    gtbm: float
    chunked_maps: float
    """Mappings and unmappings an event, once plans are in force."""


def joined(parts: list[Events]) -> Events:
    return Events(*(np.concatenate([getattr(part, column) for part in parts]) for column in COLUMNS))


def weights(first: int, seed: int) -> Events:
    """Return 200 blocks that stay."""
    r = random.Random(seed)
    sizes = [r.choice([4 << 10, 64 << 10, 2 * MIB, 8 * MIB]) for _ in range(200)]
    return Events.from_rows([(0, first + i, nbytes, 0) for i, nbytes in enumerate(sizes)])


def scaled(step: Events, share: float) -> Events:
    nbytes = np.where(step.action == 0, np.maximum(1, (step.nbytes * share).astype(np.int64)), 0)
    return Events(step.action, step.block, nbytes, step.stream, step.mobility)


def jobs(instances: Path | None, snapshots: list[Path], steps: int, blocks: int) -> Iterator[Job]:
    for path in sorted(instances.glob("*.csv")) if instances is not None else ():
        step = Events.of(read_trace(path).trace)
        yield Job(path.name.partition(".")[0], joined([weights(step.block_count, 0), *[scaled(step, 512)] * steps]))
    for family in FAMILIES:
        step = Events.of(training_trace(family, blocks, 0))
        yield Job(family, joined([weights(step.block_count, 0), *[step] * steps]))
    for family in FAMILIES:
        step, r = Events.of(training_trace(family, blocks // 2, 0)), random.Random(0)
        lengths = [r.uniform(0.3, 1) for _ in range(5)]
        events = joined([weights(step.block_count, 0), *(scaled(step, s) for s in r.choices(lengths, k=40))])
        yield Job(f"{family}, lengths", events)
        ends = tuple(200 + len(step) * (turn + 1) for turn in range(40))
        yield Job(f"{family}, lengths, named", events, ends)
    for path in snapshots:
        read = read_snapshot(path)
        yield Job(path.name, events_of(read, read.devices[0]))


def driven(job: Job, allocator: NativeAllocator) -> tuple[list[int], list[int], int, int]:
    """Return reserved and requested bytes after each event, the first with a planned address, and requests from there."""
    ends = set(job.ends)
    reserved: list[int] = []
    requested: list[int] = []
    live: dict[int, int] = {}
    first = -1
    requests = 0
    for at, (action, block, nbytes, stream) in enumerate(
        zip(*(getattr(job.events, c).tolist() for c in COLUMNS[:4]), strict=True)
    ):
        if action == 1:
            allocator.free(live.pop(block))
        else:
            live[block] = allocator.allocate(nbytes, stream)
            requests += first >= 0
        if at + 1 in ends:
            allocator.mark_step()
        reserved.append(allocator.reserved.now)
        requested.append(allocator.requested.now)
        if first < 0 and isinstance(allocator, PlannedAllocator) and allocator.counts.planned:
            first = at
    return reserved, requested, first, requests


def row_of(job: Job) -> Row:
    allocator = PlannedAllocator()
    reserved, requested, first, requests = driven(job, allocator)
    counts = allocator.counts
    from_here = max(first, 0)
    most = max(requested[from_here:])
    others = [replay(job.events, config=config, curves=True).reserved for config in (None, EXPANDABLE)]
    pytorch, expandable = (int(curve[from_here:].max()) for curve in others if curve is not None)
    chunks, ends = ChunkedAllocator(), TwoEndedAllocator(LEARNING)
    chunked, gtbm = (max(driven(job, pool)[0][from_here:]) for pool in (chunks, ends))
    maps = sum(event.at >= from_here for event in chunks.segment_log) / (len(job.events) - from_here)
    return Row(
        job.name, len(job.events), counts.planned / (requests + 1), pytorch / most - 1, expandable / most - 1,
        max(reserved[from_here:]) / most - 1, max(reserved) / max(requested) - 1,
        chunked / most - 1, gtbm / most - 1, maps,
    )  # fmt: skip


def requests_a_second(family: str, blocks: int = 2000) -> float:
    """Return the requests a second in replay: the CPU time of 60 steps less that of 10."""
    step = Events.of(training_trace(family, blocks, 0))
    taken = []
    for steps in (10, 60):
        events = joined([step] * steps)
        best = min(_seconds(events) for _ in range(3))
        taken.append(best)
    return 50 * len(step) / 2 / (taken[1] - taken[0])


def _seconds(events: Events) -> float:
    begun = time.process_time()
    replay(events, "planned")
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--snapshots", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    out = sys.stdout.write
    out(
        f"{'job':34}{'events':>9}{'planned':>9}{'pytorch':>9}{'expandable':>12}{'beyond':>9}{'whole':>9}{'chunked':>9}{'maps':>7}{'gtbm':>9}\n"
    )
    rows = []
    for job in jobs(options.instances, options.snapshots, options.steps, options.blocks):
        row = row_of(job)
        rows.append(asdict(row))
        out(
            f"{row.job:34}{row.events:9}{row.planned_share:9.1%}{row.pytorch:9.2%}{row.expandable:12.2%}"
            f"{row.planned:9.2%}{row.planned_whole:9.2%}{row.chunked:9.2%}{100 * row.chunked_maps:7.1f}{row.gtbm:9.2%}\n"
        )
    speeds = {family: requests_a_second(family, options.blocks) for family in FAMILIES}
    out("requests a second in replay: " + ", ".join(f"{f} {s / 1e6:.0f} M" for f, s in speeds.items()) + "\n")
    if options.json is not None:
        options.json.write_text(json_record(torch.device("cpu"), rows=rows, requests_a_second=speeds))


if __name__ == "__main__":
    main()
