"""Topics 7 and 8: what the GPU does in a managed step, and whether plans by measured op times are faster."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.experiment import Figures, Setting
from overspill.job import Job
from overspill.models import load
from overspill.runtime.options import Options
from overspill.runtime.training import train

from .jobs import JOBS, SMALL_BATCH, build, synchronize
from .ways import WAYS

Spans = list[tuple[float, float]]
BUDGET = "60%"
MOST_KERNELS = 25
WARM_UP_STEPS = 3
STEPS = 8


def profiled(setting: Setting, job: str, way: str, **arguments: Any) -> Figures:
    """One step under PyTorch's profiler: how long kernels and copies kept the GPU busy, and how much of it at once."""
    built = build(setting, JOBS[job])
    chosen = WAYS[way](built, **arguments)
    for _ in range(WARM_UP_STEPS):
        chosen.step()
    synchronize(setting)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]
    with profile(activities=activities) as seen:
        chosen.step()
        synchronize(setting)
    if not setting.is_cuda:
        return {"cpu_ops": len(seen.events())} | chosen.says()
    on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return gpu_figures((e.name, e.time_range.start, e.time_range.end) for e in on_gpu) | chosen.says()


def gpu_figures(events: Iterable[tuple[str, float, float]]) -> Figures:
    """What the GPU's events, each a name with its start and end in µs, add up to."""
    copies: dict[str, Spans] = {"HtoD": [], "DtoH": []}
    kernels: Spans = []
    micros: dict[str, float] = defaultdict(float)
    for name, start, end in events:
        direction = next((d for d in copies if name.startswith("Memcpy") and d in name), None)
        if direction:
            copies[direction].append((start, end))
        else:
            kernels.append((start, end))
            micros[name] += end - start
    moving = merged(copies["HtoD"] + copies["DtoH"])
    computing = merged(kernels)
    everything = merged(moving + computing)
    return {
        "kernels": len(kernels),
        "copies": {direction: len(spans) for direction, spans in copies.items()},
        "span_seconds": (everything[-1][1] - everything[0][0]) / 1e6 if everything else 0.0,
        "kernel_busy_seconds": length(computing),
        "copy_busy_seconds": {direction: length(merged(spans)) for direction, spans in copies.items()},
        "copies_beside_kernels_seconds": length(moving) + length(computing) - length(everything),
        "idle_seconds": (everything[-1][1] - everything[0][0]) / 1e6 - length(everything) if everything else 0.0,
        "kernel_micros": dict(sorted(micros.items(), key=lambda item: -item[1])[:MOST_KERNELS]),
    }


def merged(spans: Spans) -> Spans:
    """The spans as few that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Seconds that spans in µs take together."""
    return sum(end - start for start, end in spans) / 1e6


def planned_again(setting: Setting, model: str, batch: int, optimizer: str) -> Figures:
    """Simulated and measured step times of a plan by the device file, and of one by op times that a run measured."""
    size, steps = (SMALL_BATCH, 3) if setting.small else (batch, STEPS)
    job = Job(lambda: load(model, small=setting.small), size, optimizer)
    run = partial(train, job, steps=steps, device=setting.device, keep_state=False)
    first = run(Options(BUDGET))
    setting.note(**_told("by_device_file", first))
    measured = run(Options(BUDGET, profile=True)).times
    again = run(Options(BUDGET, times=measured))
    return (
        _told("by_device_file", first)
        | _told("by_measured_times", again)
        | {
            "measured_kinds_of_op": len(measured.seconds) if measured else 0,
            "losses_equal": first.losses == again.losses,
        }
    )


def _told(name: str, run: Any) -> Figures:
    return {
        f"{name}_simulated_seconds": run.plan.step_seconds,
        f"{name}_simulated_slowdown": run.plan.slowdown,
        f"{name}_offloaded_bytes": run.plan.offloaded_bytes,
        f"{name}_measured_seconds": statistics.median(run.step_seconds[1:]),
    }
