"""The optimizer's part of a whole step, by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, SMALLEST, MakeOptimizer, Mlp, Pair, batch_for, planned_peak
from torch import nn
from torch.optim import Optimizer

import overspill
from overspill.runtime.optimizers import quiet_step
from overspill.runtime.step import updates
from overspill.runtime.step.updates import OptimizerUpdates, as_on


def test_a_new_group_is_known_by_its_own_settings_though_it_lies_where_a_freed_one_lay() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    known = OptimizerUpdates(optimizer)
    kept = []
    for momentum in (0.0, 0.9) * 4:
        group = {**optimizer.param_groups[0], "momentum": momentum}
        kept.append(list(known.state_of(parameter, group, {}).shaped))
        del group
    assert kept == [[], ["momentum_buffer"]] * 4


def test_an_optimizer_is_tried_on_the_path_that_cuda_takes() -> None:
    """On CUDA several tensors go through one kernel, with other temporaries than one after the other."""
    parameter = nn.Parameter(torch.zeros(64, 48))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    (group,) = optimizer.param_groups

    class OnCuda:
        dtype, device = torch.float32, torch.device("cuda")

        @staticmethod
        def dim() -> int:
            return 2

    def share(like: Any, **settings: Any) -> float:
        return OptimizerUpdates(optimizer)._probe(like, {**group, **settings}).share

    assert share(OnCuda) == share(parameter, foreach=True) != share(parameter)
    assert share(OnCuda, foreach=False) == share(parameter)
    assert as_on(torch.device("cuda"), group)["foreach"]
    assert not as_on(torch.device("cuda"), {**group, "lr": torch.tensor(0.1)})["foreach"]
    assert not as_on(torch.device("cuda"), {**group, "fused": True})["foreach"]


def test_a_default_device_is_not_that_of_the_step() -> None:
    """As in a script that begins with `torch.set_default_device("cuda")`; here a device that has no numbers."""

    def losses(*, managed: bool) -> list[float]:
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
            x, y = torch.randn(32, 8), torch.randn(32, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if managed:
            step = overspill.train_step(model, nn.MSELoss(), optimizer, store="host", budget="smallest")
            found = [step(x, y).item() for _ in range(3)]
            step.close()
            return found
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.set_default_device("meta")
    try:
        assert losses(managed=True) == losses(managed=False)
    finally:
        torch.set_default_device(None)


class Calls:
    """How many parameters each step of our optimizer had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []

        def counted(optimizer: Optimizer) -> None:
            self.counts.append(sum(len(group["params"]) for group in optimizer.param_groups))
            quiet_step(optimizer)

        monkeypatch.setattr(updates, "quiet_step", counted)


def in_two_groups(kind: Callable[..., Optimizer]) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        first, *others = parameters
        return kind([{"params": others, "weight_decay": 0.1}, {"params": [first], "lr": 0.02}], lr=1e-2)

    return make


CLIPPED = {"clip_norm": 0.5, "clip_value": 0.01}


@pytest.mark.parametrize(
    ("optimizer", "gradients"),
    [
        (OPTIMIZERS["adamw, foreach"], {}),
        (OPTIMIZERS["adamw, foreach"], CLIPPED),
        (OPTIMIZERS["adamw, fused"], {}),
        (OPTIMIZERS["momentum"], {"accumulate": 2}),
        (in_two_groups(lambda p, **how: torch.optim.Adam(p, amsgrad=True, foreach=True, **how)), CLIPPED),
        (in_two_groups(torch.optim.RMSprop), {}),
    ],
    ids=["foreach", "foreach, clipped", "fused", "accumulated", "foreach, two groups", "two groups"],
)
def test_updates_with_room_for_one_another_are_one_step_with_the_same_numbers(
    optimizer: MakeOptimizer, gradients: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(Mlp, optimizer, gradients, {"budget": "1GiB"})
    pair.inputs = batch_for(pair.model, 1024)  # whose feature maps leave room at the peak of the step
    pair.train(2)
    calls = Calls(monkeypatch)
    pair.train(1)
    assert calls.counts == [sum(p.requires_grad for p in pair.model.parameters())]
    pair.train(2)
    pair.assert_same()


def test_at_the_smallest_budget_updates_that_have_no_room_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Mlp, OPTIMIZERS["adamw, foreach"], {}, {"budget": SMALLEST})
    pair.train(2)
    calls = Calls(monkeypatch)
    pair.train(1)
    assert len(calls.counts) > 1
    pair.assert_same()
    assert pair.step.tracker is not None
    assert pair.step.tracker.peak_bytes <= planned_peak(pair.step)


def test_an_optimizer_of_one_s_own_steps_on_one_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.optim.SGD):
        pass

    pair = Pair(Mlp, lambda p: Mine(p, 0.05), {}, {"budget": "1GiB"})
    calls = Calls(monkeypatch)
    pair.train(1)
    assert set(calls.counts) == {1}
    pair.assert_same()
