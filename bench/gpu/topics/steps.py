"""Topic 6: how fast are steps, beside what others do, at their peaks? Host time and GPU time apart."""

from __future__ import annotations

from typing import Any

import torch

from gpu.experiment import Figures, Setting, peak_of
from overspill.core.errors import InfeasibleBudgetError
from overspill.runtime.hardware import device_noun

from .jobs import INFEASIBLE, JOBS, OUT_OF_MEMORY, TRAINED, build, peaks, timed
from .ways import WAYS

CPU_BUDGET = "70%"
"""In place of a peak that nobody measures on the CPU."""
STEPS_IN_SMALL = 2


def step_time(setting: Setting, job: str, way: str, **arguments: Any) -> Figures:
    """A job's step times by one way to train, or that it has no room.

    With `at`, the budget is the card that another experiment took: what its allocator had reserved, and the context.
    """
    if "at" in arguments:
        arguments["budget"] = _card_of(setting, arguments.pop("at"))
    found: Figures = {"job": job, "batch": JOBS[job].batch_on(setting), "way": way}
    try:
        built = build(setting, JOBS[job])
        chosen = WAYS[way](built, **arguments)
        found |= timed(setting, chosen.step, *([STEPS_IN_SMALL] if setting.small else []))
        return found | chosen.says() | {"outcome": TRAINED}
    except InfeasibleBudgetError as refusal:  # a torch.OutOfMemoryError too
        told = {"message": str(refusal)[:300], "floor_bytes": refusal.floor_bytes}
        return found | {"outcome": INFEASIBLE, "budget_bytes": refusal.budget_bytes} | told
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0][:300]
        return found | {"outcome": OUT_OF_MEMORY, "message": message} | peaks(setting)


def _card_of(setting: Setting, name: str) -> str | int:
    """The card that the experiment's steps took, first ones included."""
    reserved = peak_of(setting.figures_of(name), "reserved")
    return CPU_BUDGET if reserved is None else reserved + device_noun(torch.device(setting.device)).context_bytes
