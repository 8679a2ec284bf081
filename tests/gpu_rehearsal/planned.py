"""POOL: races while the live allocator puts a compiled model's blocks where a plan says, as JSON."""

from __future__ import annotations

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


def main() -> None:
    """Train, and look for races."""
    torch.manual_seed(0)
    loaded = load("resnet18", small=True)
    model = TrainingStep(loaded)
    compiled = overspill.compile(model, budget="15MiB", placement="planned")
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
    tell({
        "races": len(found.races), "accesses": found.accesses, "offloaded_bytes": plan.offloaded_bytes,
        "planned": statistics.planned, "requests": statistics.requests, "deferred": statistics.deferred,
        "peak_bytes": plan.peak_bytes, "peak_reserved_bytes": statistics.peak_reserved_bytes,
    })  # fmt: skip


if __name__ == "__main__":
    main()
