"""The training jobs of the campaign, in full size and in small, and how the steps of one are timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from llm import LLAMA_1B, LLAMA_8B
from torch import Tensor
from torch.optim import Optimizer

from gpu.experiment import Figures, Setting
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep

SMALL_BATCH = 16
TRAINED, OUT_OF_MEMORY, INFEASIBLE = "trained", "out of memory", "infeasible"
WARM_UP_STEPS = 3
STEPS = 10
LEAST_STEPS, MOST_SECONDS = 3, 4.0
SMALL_DECODER = "decoder:width=64,depth=2,heads=4,vocabulary=211,seq_len=32"
DECODER = "decoder:width=2048,depth=24,heads=16,vocabulary=50257,seq_len=1024"


@dataclass(frozen=True)
class Job:
    """What is trained. `needs_bytes` is about what plain training takes, beyond which the batch is halved.

    One that is `made_there` is made on the device, for the host would take minutes to.
    """

    model: str
    batch: int
    optimizer: str = "momentum"
    dtype: str = "float32"
    seq_len: int | None = None
    needs_bytes: int = 0
    made_there: bool = False

    def batch_on(self, setting: Setting) -> int:
        """The batch size for this device."""
        if setting.small:
            return SMALL_BATCH
        batch, needed = self.batch, float(self.needs_bytes)
        while batch > 1 and needed > setting.memory_bytes > 0:
            batch, needed = batch // 2, needed / 2
        return batch


JOBS = {
    "resnet50": Job("resnet50", 256, needs_bytes=30 << 30),
    "gpt2": Job("gpt2", 16, "adamw", "bfloat16", 1024, needs_bytes=24 << 30),
    "decoder": Job(DECODER, 8, "adamw", "bfloat16", needs_bytes=48 << 30),
    "llama-1b": Job(f"hf:{LLAMA_1B}", 1, "adamw", "bfloat16", 4096, made_there=True),
    "llama-8b": Job(f"hf:{LLAMA_8B}", 1, "adamw", "bfloat16", 8192, made_there=True),
}


@dataclass
class Built:
    """A job in memory: the model with its loss, a batch, and the optimizer; on the CPU until `to_device`."""

    step: TrainingStep
    batch: tuple[Tensor, ...]
    make_optimizer: Callable[..., Optimizer]
    device: str

    def to_device(self) -> TrainingStep:
        """The model, which is now on the device as the batch is."""
        self.batch = tuple(t.to(self.device) for t in self.batch)
        return self.step.to(self.device)

    def optimizer(self) -> Optimizer:
        """The optimizer of the model's parameters."""
        return self.make_optimizer(self.step.parameters())


def build(setting: Setting, job: Job) -> Built:
    """The job, on the CPU; the same seed, so the same weights and data, each time."""
    torch.manual_seed(0)
    name = SMALL_DECODER if setting.small and job.model.startswith("decoder:") else job.model
    seq_len = None if setting.small else job.seq_len
    with torch.device(setting.device) if job.made_there else nullcontext():
        found = load(name, small=setting.small and not name.startswith("decoder:"), seq_len=seq_len)
    dtype = torch.float32 if setting.small else getattr(torch, job.dtype)  # which every machine has kernels for
    step, batch = TrainingStep(found).to(dtype), found.make_batch(job.batch_on(setting))
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    if job.made_there and setting.is_cuda:
        torch.cuda.empty_cache()  # of what the model took in float32
    return Built(step, batch, optimizer_named(job.optimizer), setting.device)


def forget_peaks(setting: Setting) -> None:
    """Begin a stretch of time whose peaks are of interest."""
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()


def peaks(setting: Setting) -> Figures:
    """What the allocator says since `forget_peaks`, and how much of the device is in use now; of a CPU nothing."""
    if not setting.is_cuda:
        return {}
    free, total = torch.cuda.mem_get_info()
    found: Figures = {"device_used_bytes": total - free}
    stats = torch.cuda.memory_stats()
    return found | {
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "retries": stats.get("num_alloc_retries", 0),
        "out_of_memory_events": stats.get("num_ooms", 0),
    }


def timed(setting: Setting, step: Callable[[], Tensor], steps: int = STEPS) -> Figures:
    """Step times: as a loop takes them, and step by step on the host and between two events on the GPU; peaks too.

    Slow steps are fewer than `steps`.

    The losses are those of the first steps, which start from the same seed under every way to train.
    """
    torch.manual_seed(1)
    begun = time.perf_counter()
    losses = [step().item()]
    first = time.perf_counter() - begun
    for _ in range(WARM_UP_STEPS - 1):
        begun = time.perf_counter()
        losses.append(step().item())
    slow = int(MOST_SECONDS / (time.perf_counter() - begun))
    steps = max(LEAST_STEPS, min(steps, slow))
    setting.note(losses=losses, first_step_seconds=first, first_steps_peaks=peaks(setting), steps=steps)
    gc.collect()
    forget_peaks(setting)
    synchronize(setting)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(setting)
    found: Figures = {"step_seconds": (time.perf_counter() - begun) / steps}
    host, gpu = zip(*(_one_step(setting, step) for _ in range(steps)), strict=True)
    found |= {"host_seconds": statistics.median(host), "host_seconds_all": list(host)}
    if setting.is_cuda:
        found |= {"gpu_seconds": statistics.median(gpu), "gpu_seconds_all": list(gpu)}
    return found | peaks(setting)


def _one_step(setting: Setting, step: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds until the host has given the device all of a step, and seconds between events before and behind it."""
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if setting.is_cuda else []
    begun = time.perf_counter()
    for event in events[:1]:
        event.record()
    step()
    for event in events[1:]:
        event.record()
    host = time.perf_counter() - begun
    synchronize(setting)
    return host, events[0].elapsed_time(events[1]) / 1000 if events else 0.0


def synchronize(setting: Setting) -> None:
    """Wait until the device has done everything."""
    if setting.is_cuda:
        torch.cuda.synchronize()
