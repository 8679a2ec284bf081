"""Topic 10: a decoder whose weights, gradients and optimizer state are three times its budget, trained whole-step."""

from __future__ import annotations

from gpu.experiment import Figures, Setting
from overspill.core.units import parse_bytes

from .jobs import DECODER, Job, build, timed
from .ways import eager, whole_step

JOB = Job(DECODER.replace("seq_len=1024", "seq_len=512"), 2, "adamw")
BUDGET = "6GiB"
STEPS = 3


def decoder(setting: Setting, *, plain: bool) -> Figures:
    """Step times, losses and peaks, plainly or within the budget."""
    built = build(setting, JOB)
    parameters = sum(p.nbytes for p in built.step.parameters())
    found: Figures = {"parameter_bytes": parameters, "state_bytes": 4 * parameters}
    if plain:
        return found | timed(setting, eager(built).step, STEPS)
    budget = parse_bytes(BUDGET) if not setting.small else "60%"
    way = whole_step(built, budget)
    return found | timed(setting, way.step, STEPS) | way.says()
