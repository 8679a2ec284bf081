"""A loop that nobody edited, compiled within less than its weights, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

import stand_in
import torch
from tests.gpu_rehearsal.mutants import IN, MUTANTS, OUT, lane
from tests.gpu_rehearsal.races import find_races
from tests.gpu_rehearsal.touching import Touching
from torch import nn

import overspill
from overspill.runtime.compiled.stored_gradient import StoredGradient
from overspill.runtime.step.away import Away

WIDTH, LAYERS = 1024, 8
BUDGET = "292MiB"
"""172 MiB of it are the context; weights, gradients and state are 128 MiB, and plain PyTorch needs more than 400."""
COMPUTE = 1
"""The legacy stream of the first device, on which PyTorch computes."""


class TouchingPlain(Touching):
    """Logs what ops touch once the tensors that are away have been brought back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, StoredGradient | Away) for one in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_weights_gradients_and_state_move_in_order_within_the_card(record: Any) -> None:
    parts = [layer for _ in range(LAYERS) for layer in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*parts).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = overspill.compile(model, budget=BUDGET)
    compiled.overspill.tracker = touching = TouchingPlain()
    x = torch.randn(16, WIDTH, device="cuda")

    def step() -> None:
        made = compiled(x)
        with touching:
            made.square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    before = stand_in.counts()
    step()
    since = stand_in.counts().since(before)
    stand_in.take_log()
    stand_in.log(True)
    for read in (False, True, False):
        step()
        if read:
            saved = model.state_dict(), optimizer.state_dict()["state"]
    stand_in.log(False)
    log = stand_in.take_log()
    found = find_races(log)
    (plan,) = compiled.overspill.plans
    row = {
        "offloaded_bytes": plan.offloaded_bytes, "reserved_bytes": plan.reserved_bytes,
        "most_bytes": torch.cuda.max_memory_reserved(), "syncs": since.syncs, "mallocs": since.mallocs,
        "copies": since.copies, "accesses": found.accesses, "races": len(found.races),
    }  # fmt: skip
    record.rows("a_loop").append(row)
    assert plan.device_bytes <= 292 << 20
    assert row["most_bytes"] <= plan.reserved_bytes
    assert (since.syncs, since.mallocs) == (0, 0)
    assert found.accesses > 1000
    assert found.races == []
    assert lane(log, OUT) != lane(log, IN)
    for mutant in ("await_offload does not wait", "await_prefetch does not wait"):
        assert find_races(MUTANTS[mutant](log, COMPUTE)).races
    weights, state = saved
    assert len(state) == len(weights) == len(list(model.parameters()))
    assert all({"exp_avg", "exp_avg_sq", "step"} == one.keys() for one in state.values())
