"""DOOR MODEL BATCH OPTIMIZER BUDGET: four steps on the card of this process; what it was like, as JSON."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OVERSPILL_EFFORT", "0.1")

import stand_in
import torch
from tests.gpu_rehearsal.jobs import job
from tests.gpu_rehearsal.processes import tell

STEPS = 4


def main(door: str, model: str, batch: str, optimizer: str, budget: str) -> None:
    """Train, and print what happened."""
    found: dict[str, object] = {"outcome": "survived"}
    planned = done = 0
    try:
        with job(door, model, int(batch), int(budget), optimizer=optimizer) as it:
            while done < STEPS:
                it.step()
                done += 1
                planned = it.plan().peak_bytes
    except Exception as error:  # noqa: BLE001 - what it was is the answer
        found = {"outcome": type(error).__name__, "steps": done, "said": str(error).splitlines()[0][:200]}
    statistics = torch.cuda.memory_stats()
    found |= {
        "planned_bytes": planned,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": stand_in.peak_bytes(),
        "retries": statistics["num_alloc_retries"],
    }
    tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
