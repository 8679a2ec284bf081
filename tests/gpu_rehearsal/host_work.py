"""DOOR MODEL BATCH OPTIMIZER BUDGET: what the host does in a step, as JSON. The door `plain` is PyTorch alone.

Times are processor seconds of all threads, which other work on the machine lengthens less than it does the time that passes.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import stand_in
import torch
from tests.gpu_rehearsal.jobs import job
from tests.gpu_rehearsal.processes import tell

from overspill.core import Verb

WARM_UP, STEPS = 3, 9


def microseconds_of_an_add() -> float:
    """What one eager addition costs the host, the least of several rounds: the unit in which calls are counted."""
    x = torch.empty(16, device="cuda")
    best = float("inf")
    for _ in range(20):
        begun = time.process_time()
        for _ in range(1000):
            torch.ops.aten.add.Tensor(x, x)
        best = min(best, time.process_time() - begun)
    return best * 1e3


def main(door: str, model: str, batch: str, optimizer: str, budget: str) -> None:
    """Train, and print what a step took."""
    with job(door, model, int(batch), float(budget), optimizer=optimizer) as it:
        for _ in range(WARM_UP):
            it.step()
        seconds = []
        before = stand_in.counts()
        for _ in range(STEPS):
            begun = time.process_time()
            it.step()
            seconds.append(time.process_time() - begun)
        counts = stand_in.counts().since(before)
        plan = it.plan()
        verbs = [instruction.verb for instruction in plan.schedule.instructions] if plan is not None else []
        found = {
            "host_ms": min(seconds) * 1e3,
            "host_ms_median": median(seconds) * 1e3,
            "add_us": microseconds_of_an_add(),
            "swaps": verbs.count(Verb.PREFETCH),
            "simulated_ms": plan.step_seconds * 1e3 if plan is not None else None,
        }
        found |= {name: round(count / STEPS) for name, count in counts._asdict().items()}
    tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
