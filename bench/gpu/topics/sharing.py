"""Topic 12: a job gives the GPU to another program between two steps, and goes on."""

from __future__ import annotations

import time

import torch

from gpu.experiment import Figures, Setting

from .jobs import JOBS, build, synchronize
from .ways import managed, whole_step

STEPS = 3


def parked(setting: Setting, *, door: str, budget: str) -> Figures:
    """Losses of steps with and without `park` between them, its seconds and bytes, and what the device has meanwhile."""
    losses: list[list[float]] = []
    found: Figures = {}
    for parks in (False, True):
        torch.manual_seed(1)
        built = build(setting, JOBS["gpt2"])
        way = (managed if door == "compile" else whole_step)(built, budget)
        losses.append([])
        for number in range(STEPS):
            losses[-1].append(way.step().item())
            if parks and number == 0:
                synchronize(setting)
                found["reserved_before_bytes"] = torch.cuda.memory_reserved() if setting.is_cuda else None
                begun = time.perf_counter()
                found["parked_bytes"] = way.source.park()
                synchronize(setting)
                found["park_seconds"] = time.perf_counter() - begun
                found["reserved_parked_bytes"] = torch.cuda.memory_reserved() if setting.is_cuda else None
                begun = time.perf_counter()
                way.source.unpark()
                synchronize(setting)
                found["unpark_seconds"] = time.perf_counter() - begun
        way.source.close()
    return found | {"losses": losses[0], "parked_losses": losses[1]}
