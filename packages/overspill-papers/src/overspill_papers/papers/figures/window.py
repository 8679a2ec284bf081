"""The window paper's plots.

Fig. 3 shows budgets and really used memory; Figs. 4 and 5 show time and memory over batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from overspill.core.errors import InfeasibleBudgetError
from overspill_papers.papers.lab import Lab, LabSetting
from overspill_papers.papers.run import PaperPool
from overspill_papers.papers.window import (
    BASE,
    BEST_FIT,
    CHUNKS,
    DEEPLAB,
    DENSENET,
    GB,
    OUTSIDE_SECONDS,
    PIX2PIX,
    SCHEDULE,
    remap_seconds,
    resnet,
)

from . import Curve, PaperFigure

RESNET_BATCHES = (190, 256, 512, 928, 1120, 1248, 1440)
BATCHES = {DENSENET: (64, 120, 256, 512, 768, 1024, 1536), PIX2PIX: (2, 4, 8, 16, 24), DEEPLAB: (6, 12, 24, 32, 48)}
POOLS = {"Schedule": BEST_FIT, "Schedule + VA": CHUNKS}


def _budgets(pool: PaperPool, lab: Lab) -> Mapping[str, Curve]:
    budgets: dict[float, float] = {}
    used: dict[float, float] = {}
    for batch in RESNET_BATCHES:
        try:
            run, budget = lab.run_within(resnet(batch), SCHEDULE, pool)
        except InfeasibleBudgetError:  # the curve ends here
            break
        budgets[batch], used[batch] = budget / GB, run.reserved_bytes(pool) / GB
    return {"budget": budgets, "memory used": used}


def _over_batches(setting: LabSetting, lab: Lab, *, memory: bool) -> Mapping[str, Curve]:
    curves: dict[str, dict[float, float]] = {}
    for label, pool in (("baseline", BEST_FIT), *POOLS.items()):
        curve = curves.setdefault(label, {})
        for batch in BATCHES[setting]:
            there = replace(setting, batch=batch)
            try:
                run = lab.run(there, BASE) if label == "baseline" else lab.run_within(there, SCHEDULE, pool)[0]
            except InfeasibleBudgetError:
                break
            if not run.fits(pool):
                break
            seconds = run.seconds + OUTSIDE_SECONDS + remap_seconds(run, pool)
            curve[batch] = run.reserved_bytes(pool) / GB if memory else batch / seconds
    return curves


FIGURES = (
    PaperFigure("Fig. 3", "ResNet-50, Schedule: largest budget and memory used", "batch", "GB",
        partial(_budgets, BEST_FIT), lines=True),
    PaperFigure("Fig. 3", "ResNet-50, Schedule + VA: largest budget and memory used", "batch", "GB",
        partial(_budgets, CHUNKS), lines=True),
    *(
        PaperFigure(where, f"{name}: {what}", "batch", unit, partial(_over_batches, setting, memory=memory), lines=True)
        for where, what, unit, memory in (
            ("Fig. 4", "throughput", "images/s", False), ("Fig. 5", "memory used", "GB", True)
        )
        for name, setting in (("DenseNet", DENSENET), ("Pix2PixHD", PIX2PIX), ("DeepLabv3+", DEEPLAB))
    ),
)  # fmt: skip
