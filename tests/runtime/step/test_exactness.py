"""A whole step gives the bits of the plain loop: every optimizer, with clipping and accumulation, by every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, SMALLEST, Cnn, Lm, Mlp, Pair, cross_entropy, made, planned_peak
from tests.turns import rest_long
from torch import nn

import overspill
from overspill.core import TensorKind, Verb
from overspill.policies import POLICIES
from overspill.runtime.step import updates

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulate": 4, "clip_norm": 0.5, "clip_value": 0.01},
}


@pytest.mark.short("adafactor-plain", "adamw-plain", "adamw-accumulated and clipped", "momentum-plain")
@pytest.mark.parametrize(
    ("optimizer", "way"),
    [
        pytest.param(o, way, marks=pytest.mark.long if way != "plain" and o != "adamw" else ())
        for o in OPTIMIZERS
        for way in WAYS
    ],
)
def test_every_optimizer_gives_the_bits_of_the_plain_loop(optimizer: str, way: str) -> None:
    pair = Pair(Mlp, OPTIMIZERS[optimizer], WAYS[way])
    pair.train(5)
    pair.assert_same()
    assert pair.step.tracker is not None
    # two temporaries of this tiny model are more than 2 %
    assert 0.98 * planned_peak(pair.step) - 4608 <= pair.step.tracker.peak_bytes <= planned_peak(pair.step)


@pytest.mark.parametrize("policy", rest_long(POLICIES, ["auto", "checkpoint"]))
def test_every_policy_does_what_it_can_and_gives_the_bits_of_the_plain_loop(policy: str) -> None:
    model = Cnn if policy in ("superneurons-offload", "vdnn-conv") else Lm  # they move what convolutions read
    budget = SMALLEST if POLICIES[policy].plans_for_budget else "1GiB"
    pair = Pair(model, OPTIMIZERS["momentum"], options={"policy": policy, "budget": budget})
    pair.train(2)
    pair.assert_same()
    assert pair.step.tracker is not None
    assert pair.step.tracker.peak_bytes <= planned_peak(pair.step)
    (plan,) = pair.step.plans
    used = Verb.OFFLOAD in plan.schedule.counts, Verb.RECOMPUTE in plan.schedule.counts
    assert used == (POLICIES[policy].offloads, POLICIES[policy].recomputes)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_smallest_budget_keeps_most_tensors_in_the_store(accumulate: int) -> None:
    pair = Pair(Lm, gradients={"accumulate": accumulate}, options={"policy": "auto", "store": "disk"})
    pair.train(3)
    pair.assert_same()
    assert pair.step.tracker is not None
    assert pair.step.tracker.peak_bytes <= planned_peak(pair.step)
    kinds = {t.kind for plan in pair.step.plans for t in plan.graph.tensors if t.id in plan.schedule.stored}
    assert kinds >= {TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE}


def test_groups_and_schedules_are_read_anew_at_every_step() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.5, "weight_decay": 0.1}, {"params": rest}], lr=0.01, momentum=0.9
        )

    pair = Pair(Mlp, grouped)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.plain.optimizer, pair.optimizer)]
    for _ in range(4):
        pair.train()
        for schedule in schedules:
            schedule.step()
    pair.plain.optimizer.param_groups[1]["momentum"] = pair.optimizer.param_groups[1]["momentum"] = 0.5
    pair.train(2)
    pair.assert_same()
    assert len(pair.step.plans) == 1


def test_autocast_is_part_of_the_step() -> None:
    pair = Pair(Mlp)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):  # whose cache of weights lasts until its end
            pair.train()
    pair.assert_same()
    pair.train(2)
    pair.assert_same()
    assert len(pair.step.plans) == 2


def test_other_batch_sizes_and_modes_are_planned_anew() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    pair.train(1, tuple(t[:4] for t in pair.inputs))
    for model in (pair.plain.model, pair.model):
        model.drop.eval()
    pair.train(2)
    pair.assert_same()
    assert len(pair.step.plans) == 3


@pytest.mark.long
@pytest.mark.parametrize("budget", rest_long([0.9, "smallest"], ["smallest"]))
def test_a_budget_that_follows_from_the_first_step_holds_for_a_partial_batch(budget: str | float) -> None:
    pair = Pair(Mlp, options={"policy": "auto", "budget": 0.9})
    pair.step._plans.options = replace(pair.step.options, budget=budget)
    pair.train(2)
    pair.train(1, tuple(t[:4] for t in pair.inputs))
    pair.assert_same()
    first, second = pair.step.plans
    assert first.budget_bytes == second.budget_bytes
    assert (first.budget_bytes == first.peak_bytes) or budget != "smallest"


@pytest.mark.long
def test_the_smallest_budget_grows_with_a_larger_batch() -> None:
    pair = Pair(Mlp, options={"policy": "auto", "budget": "smallest"})
    pair.train(2)
    pair.train(2, tuple(t.repeat(2, *[1] * (t.dim() - 1)) for t in pair.inputs))
    pair.assert_same()
    first, second = (plan.budget_bytes for plan in pair.step.plans)
    assert first < second


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(o, marks=pytest.mark.long) for o in ("momentum", "adagrad", "rmsprop"))]
)
def test_slices_give_the_bits_of_the_whole(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(updates.SLICE_BYTES, "cpu", 100)  # a row and a bit
    pair = Pair(Mlp, OPTIMIZERS[optimizer], {"clip_norm": 0.5})
    pair.train(3)
    pair.assert_same()


@pytest.mark.long
def test_weights_in_channels_last_are_sliced_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(updates.SLICE_BYTES, "cpu", 300)
    pair = Pair(lambda: Cnn().to(memory_format=torch.channels_last))
    pair.train(3, (pair.inputs[0].to(memory_format=torch.channels_last), pair.inputs[1]))
    pair.assert_same()


@pytest.mark.long
@pytest.mark.parametrize("gradients", rest_long([{}, {"clip_norm": 0.1}], [{"clip_norm": 0.1}]), ids=str)
def test_gradients_are_laid_out_as_autograd_leaves_them_for_what_sums_them_up(gradients: dict[str, Any]) -> None:
    pair = Pair(Cnn, OPTIMIZERS["adafactor"], gradients)  # the weights are contiguous, their gradients in channels-last
    pair.train(3, (pair.inputs[0].to(memory_format=torch.channels_last), pair.inputs[1]))
    pair.assert_same()


def test_it_goes_on_without_overspill_from_what_was_saved(tmp_path: Any) -> None:
    pair = Pair(Mlp, gradients={"clip_norm": 1.0})
    pair.train(3)
    torch.save({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint")
    model = made(Mlp)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    pair.model, pair.optimizer = model, optimizer
    pair.step = type(pair.plain)(model, optimizer, clip_norm=1.0)  # type: ignore[assignment]
    pair.train(2)
    pair.assert_same()


def test_a_parameter_that_the_loss_does_not_read_has_no_state() -> None:
    class Partly(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.unread = nn.Linear(100, 100)

    pair = Pair(Partly)
    pair.train(3)
    pair.assert_same()


def test_the_loss_may_be_a_criterion() -> None:
    model = made()
    step = overspill.train_step(model, nn.CrossEntropyLoss(), OPTIMIZERS["sgd"](model.parameters()), policy="liveness")
    other = made()
    x, y = torch.randn(8, 12), torch.randint(0, 5, (8,))
    torch.manual_seed(1)
    expected = cross_entropy(other, x, y)
    torch.manual_seed(1)
    assert step(x, y) == expected
