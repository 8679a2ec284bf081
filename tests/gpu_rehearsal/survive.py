"""DOOR MODEL BATCH OPTIMIZER BUDGET [used]: four steps on the card of this process; what it was like, as JSON.

`used`: matrices were multiplied on it before.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

os.environ.setdefault("OVERSPILL_EFFORT", "0.1")

import stand_in
import torch
from tests.gpu_rehearsal.jobs import job
from tests.gpu_rehearsal.processes import tell

STEPS = 4


def main(door: str, model: str, batch: str, optimizer: str, budget: str, used: str = "") -> None:
    """Train, and print what happened."""
    if used:
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        del x
    found: dict[str, object] = {"outcome": "survived"}
    done = 0
    with job(door, model, int(batch), int(budget), optimizer=optimizer) as it:
        try:
            while done < STEPS:
                it.step()
                done += 1
        except Exception as error:  # noqa: BLE001 - what it was is the answer
            found = {"outcome": type(error).__name__, "said": str(error).splitlines()[0][:200]}
        with suppress(IndexError):  # there is no plan where the model alone was too large
            found |= {"planned_bytes": it.plan().peak_bytes, "planned_allocated_bytes": it.plan().allocated_bytes}
    statistics = torch.cuda.memory_stats()
    found |= {
        "steps": done,
        "requested_bytes": statistics["requested_bytes.all.peak"],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "card_bytes": stand_in.peak_bytes(),
        "retries": statistics["num_alloc_retries"],
    }
    tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
