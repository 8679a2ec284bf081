"""Topic 9: how far are estimates from plain training on this GPU?"""

from __future__ import annotations

import torch

import overspill
from gpu.experiment import Figures, Setting

from .jobs import Job, build, forget_peaks, peaks, synchronize
from .ways import eager

STEPS = 3


def estimated(setting: Setting, model: str, batch: int, optimizer: str) -> Figures:
    """Plain training of a job, counted by PyTorch's allocator and by the driver, beside the estimate of it."""
    job = Job(model, batch, optimizer)
    if setting.is_cuda:
        device = overspill.load_device(torch.cuda.get_device_name(setting.device))
        free, total = torch.cuda.mem_get_info()
        others = total - free  # a context of ours among them
    else:
        device, others = overspill.load_device("a100-80gb"), 0
    answer = overspill.estimate(model, batch=job.batch_on(setting), optimizer=optimizer, device=device)
    found: Figures = {
        "estimated_allocated_bytes": answer.peak_allocated_bytes,
        "estimated_reserved_bytes": answer.peak_reserved_bytes,
        "estimated_total_bytes": answer.total_bytes,
        "estimated_context_bytes": answer.context_bytes,
        "before_bytes": others,
    }
    setting.note(**found)
    built = build(setting, job)
    way = eager(built)
    forget_peaks(setting)
    for _ in range(STEPS):
        way.step()
    synchronize(setting)
    return found | peaks(setting)
