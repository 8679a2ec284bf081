"""Updates that a plan has gathered: one step of the optimizer, with the numbers of plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, SMALLEST, MakeOptimizer, Mlp, Pair, batch_for, planned_peak
from torch import nn
from torch.optim import Optimizer

from overspill.runtime import optimizer_step
from overspill.runtime.optimizer_step import own_step
from overspill.runtime.step import updates


class Calls:
    """How many parameters each step of the optimizer had; of a model alone, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None) -> None:
        self.counts: list[int] = []
        own = {id(p) for p in model.parameters()} if model is not None else None

        def counted(optimizer: Optimizer) -> None:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            self.counts.append(sum(own is None or id(p) in own for p in stepped))
            own_step(optimizer)

        monkeypatch.setattr(updates, "own_step", counted)
        monkeypatch.setattr(optimizer_step, "own_step", counted)


def in_two_groups(kind: Callable[..., Optimizer]) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        first, *others = parameters
        return kind([{"params": others, "weight_decay": 0.1}, {"params": [first], "lr": 0.02}], lr=1e-2)

    return make


CLIPPED = {"clip_norm": 0.5, "clip_value": 0.01}


@pytest.mark.parametrize(
    ("optimizer", "gradients"),
    [
        pytest.param(OPTIMIZERS["adamw, foreach"], {}, marks=pytest.mark.long),
        (OPTIMIZERS["adamw, foreach"], CLIPPED),
        (OPTIMIZERS["adamw, fused"], {}),
        (OPTIMIZERS["momentum"], {"accumulate": 2}),
        (in_two_groups(lambda p, **how: torch.optim.Adam(p, amsgrad=True, foreach=True, **how)), CLIPPED),
        pytest.param(in_two_groups(torch.optim.RMSprop), {}, marks=pytest.mark.long),
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
    calls = Calls(monkeypatch, pair.model)
    pair.train(1)
    assert set(calls.counts) - {0} == {1}
    pair.assert_same()
