"""Topic 7: what `overspill.record` says of a managed step beside PyTorch's profiler, and what it costs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import overspill
from gpu.experiment import Figures, Setting
from overspill.core import Verb
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.report.recording import Recording
from overspill.runtime.recording.record import RunRecord

from .jobs import JOBS, build, synchronize
from .kernels import gpu_figures
from .ways import WAYS, Way

WARM_UP_STEPS = 3
ROUNDS = 5
COPIES = {Verb.OFFLOAD: "Memcpy DtoH", Verb.PREFETCH: "Memcpy HtoD"}


def recorded(setting: Setting, job: str, way: str, **arguments: Any) -> Figures:
    """Steps with and without a recording in turns; copies beside ops as recorded, and beside kernels as the profiler has it."""
    built = build(setting, JOBS[job])
    chosen = WAYS[way](built, **arguments)
    for _ in range(WARM_UP_STEPS):
        chosen.step()
    plain, ours, seen = [], [], None
    for _ in range(ROUNDS):
        plain.append(_seconds(setting, chosen.step))
        seen, seconds = _recorded_step(setting, chosen)
        ours.append(seconds)
    assert seen is not None
    found = {
        "plain_step_seconds": plain,
        "recorded_step_seconds": ours,
        "ratio_median": statistics.median(one / other for one, other in zip(ours, plain, strict=True)),
        "prepared_seconds": seen.record.facts[0].prepared_seconds,
        "waited_seconds": seen.waited_seconds[-1],
        "host_seconds": sum(thing.seconds for thing in seen.record.within(seen.record.host, 1)),
        "instructions": len(seen.record.within(seen.record.compute, 1)),
        "recorded": gpu_figures(_events(seen.record)),
    }
    setting.note(**found)
    if setting.is_cuda:
        found |= {"profiled": _profiled(setting, chosen)}
        setting.note(**found)
    return found | _snapshot(setting, chosen) | chosen.says()


def _seconds(setting: Setting, step: Callable[[], Any]) -> float:
    """How long a step takes until the device is done."""
    synchronize(setting)
    begun = time.perf_counter()
    step()
    synchronize(setting)
    return time.perf_counter() - begun


def _recorded_step(setting: Setting, chosen: Way) -> tuple[Recording, float]:
    """A recording of two steps, and the seconds of the second, in which nothing is made ready."""
    with overspill.record(chosen.source, steps=3, snapshot=False) as seen:
        chosen.step()
        seconds = _seconds(setting, chosen.step)
    return seen, seconds


def _events(record: RunRecord) -> Iterator[tuple[str, float, float]]:
    """Ops and copies of the second step, as the profiler names and times them."""
    for thing in record.within(record.compute, 1):
        if thing.is_op and thing.label is not None:
            yield thing.label.name, thing.begin_seconds * 1e6, thing.end_seconds * 1e6
    for verb, copies in record.copies.items():
        for copy in record.within(copies, 1):
            yield COPIES[verb], copy.begin_seconds * 1e6, copy.end_seconds * 1e6


def _profiled(setting: Setting, chosen: Way) -> Figures:
    """The same of a step that the profiler sees."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        chosen.step()
        synchronize(setting)
    on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return gpu_figures((e.name, e.time_range.start, e.time_range.end) for e in on_gpu)


def _snapshot(setting: Setting, chosen: Way) -> Figures:
    """What the memory of a step is as PyTorch recorded it, and whether the simulated allocator does the same."""
    with overspill.record(chosen.source, steps=2) as seen:
        seconds = _seconds(setting, chosen.step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pickle"
        seen.snapshot(path)
        nbytes, replayed = path.stat().st_size, replay_snapshot(read_snapshot(path))
    return {
        "snapshot_step_seconds": seconds,
        "snapshot_bytes": nbytes,
        "snapshot_events": replayed.events,
        "snapshot_replays": replayed.equal,
        "recorded_live_bytes": seen.peak_bytes,
        "snapshot_requested_bytes": replayed.peak_requested_bytes,
    }
