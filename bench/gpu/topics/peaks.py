"""Topic 5: does a budget hold? Planned, allocated, reserved and device bytes; and whether a card of that size is enough."""

from __future__ import annotations

import torch

from gpu.experiment import Figures, Setting
from overspill.core.errors import InfeasibleBudgetError

from .jobs import INFEASIBLE, Job, build, forget_peaks, peaks, synchronize
from .ways import Way, managed, whole_step

STEPS = 6
JOBS = {"resnet50": Job("resnet50", 64), "gpt2": Job("gpt2", 8, "adamw")}


def peak(setting: Setting, job: str, budget: str, placement: str | None = None, door: str = "compile") -> Figures:
    """Steps of a job within a share of its memory, by a door; the environment says how PyTorch's allocator works."""
    built = build(setting, JOBS[job])
    try:
        return _steps(
            setting, whole_step(built, budget) if door == "step" else managed(built, budget, placement=placement)
        )
    except InfeasibleBudgetError as refusal:
        return {"outcome": INFEASIBLE, "budget_bytes": refusal.budget_bytes, "floor_bytes": refusal.floor_bytes}


def survives(setting: Setting, job: str, of: str, factor: float) -> Figures:
    """Whether the job trains where PyTorch's allocator may reserve `factor` times what the budget of `of` has for it."""
    told = setting.figures_of(of)
    budget = told["budget_bytes"]
    limit = int(factor * (budget - (told["planned_device_bytes"] - told["planned_reserved_bytes"])))
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    built = build(setting, JOBS[job])
    found: Figures = {"budget_bytes": budget, "limit_bytes": limit}
    try:
        return found | _steps(setting, managed(built, budget)) | {"survived": True}
    except InfeasibleBudgetError as refusal:  # a torch.OutOfMemoryError too
        return found | {"survived": False, "message": str(refusal)[:300], "floor_bytes": refusal.floor_bytes}
    except torch.OutOfMemoryError as error:
        return found | {"survived": False, "message": str(error).splitlines()[0][:300]} | peaks(setting)


def whole_device(setting: Setting, job: str) -> Figures:
    """`budget=None`, all of the device's memory: it must not be more than there is."""
    return _steps(setting, managed(build(setting, JOBS[job]), None))


def _steps(setting: Setting, way: Way) -> Figures:
    forget_peaks(setting)
    losses = []
    for _ in range(STEPS):
        losses.append(way.step().item())
        setting.note(losses=losses, **peaks(setting))
    synchronize(setting)
    return {"losses": losses} | way.says() | peaks(setting)
