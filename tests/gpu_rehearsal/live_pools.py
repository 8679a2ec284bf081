"""PLACEMENT: races while a live pool gives a compiled model's blocks their addresses, as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import stand_in
import torch
from tests.gpu_rehearsal.processes import tell
from tests.gpu_rehearsal.races import find_races
from tests.gpu_rehearsal.touching import Touching

import overspill
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.runtime.live.allocator import serving

STEPS = 9
ASKED: dict[str, dict[str, Any]] = {
    "two-ended": {"budget": "800MiB", "policy": "vdnn-all"},
    "virtual": {"budget": "2000MiB", "policy": "vdnn-all"},
}
"""By placement. The simulated pools take β of 300 MiB, and a chunk of 2 MiB for each block: what moves even so is a policy's."""


def main() -> None:
    """Train, and look for races."""
    placement = sys.argv[1]
    torch.manual_seed(0)
    loaded = load("resnet18", small=True)
    model = TrainingStep(loaded)
    compiled = overspill.compile(model, placement=placement, **ASKED[placement])
    model.to("cuda")
    batch = tuple(t.to("cuda") for t in loaded.make_batch(64))
    optimizer = optimizer_named("momentum")(model.parameters())
    touching = Touching()
    compiled.overspill.tracker = touching
    stand_in.log(True)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        compiled(*batch).backward()
        with touching:
            optimizer.step()
    stand_in.log(False)
    found = find_races(stand_in.take_log())
    plan, allocator = compiled.overspill.plans[0], serving()
    assert allocator is not None
    statistics = allocator.statistics()
    pool = compiled.overspill.pool
    assert pool is not None
    tell({
        "placement": placement, "pool": asdict(pool),
        "races": len(found.races), "accesses": found.accesses, "offloaded_bytes": plan.offloaded_bytes,
        "requests": statistics.requests, "deferred": statistics.deferred,
        "peak_bytes": plan.peak_bytes, "peak_reserved_bytes": statistics.peak_reserved_bytes,
    })  # fmt: skip


if __name__ == "__main__":
    main()
