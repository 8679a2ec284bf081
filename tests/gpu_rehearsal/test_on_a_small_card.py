"""A model that is larger than its card: in host memory, or mapped from a file."""

from __future__ import annotations

from typing import Any

import pytest
import stand_in
import torch
from tests.gpu_rehearsal.processes import found_on_card
from tests.gpu_rehearsal.races import find_races
from tests.gpu_rehearsal.small_card import WIDTH, Adapted, mapped
from tests.gpu_rehearsal.touching import Touching
from torch import nn

import overspill

CARD_BYTES = {"train_step": 256 << 20, "compile": 268 << 20}
"""Weights that move in a loop have no arena, and PyTorch's allocator takes more."""


@pytest.mark.parametrize(
    ("door", "how"), [("train_step", "in-memory"), ("train_step", "mapped"), ("compile", "mapped")]
)
def test_a_model_larger_than_its_card_is_trained_and_comes_back_to_the_host(door: str, how: str, record: Any) -> None:
    found = found_on_card("small_card", door, how, card_bytes=CARD_BYTES[door], copy_limit=1 << 30)
    record.rows("small_card").append({"door": door, "how": how} | found)
    assert found["model_bytes"] > CARD_BYTES[door] - found["context_bytes"] >= found["most_bytes"]
    assert found["most_bytes"] <= found["reserved_bytes"]
    assert found["loss_on"] == "cuda:0"
    # Frozen weights are read from where they are, and nothing waits.
    assert found["first_bytes_out"] < found["model_bytes"] / 10
    assert found["bytes_out"] < found["bytes_in"] / 10
    assert found["bytes_in"] >= found["moved_bytes"]
    assert (found["syncs"], found["mallocs"]) == (0, 0)
    assert found["same_when_read"]
    assert found["same_at_the_end"]
    assert found["where_they_were"] > 0
    assert found["at_the_end_on"] == ["cpu"]


def test_no_copy_races_from_the_first_step_on(record: Any) -> None:
    model = mapped(Adapted())
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    step = overspill.train_step(model, nn.MSELoss(), optimizer, device="cuda", budget="250MiB")
    step.tracker = Touching()
    x = torch.randn(16, WIDTH, device="cuda")
    stand_in.take_log()
    stand_in.log(True)
    for read in (False, True, False):
        step(x, x)
        step(x, x)
        if read:
            model.state_dict()
    stand_in.log(False)
    found = find_races(stand_in.take_log())
    step.close()
    record.rows("races_of_a_small_card").append({"accesses": found.accesses, "races": len(found.races)})
    assert found.accesses > 1000
    assert found.races == []
