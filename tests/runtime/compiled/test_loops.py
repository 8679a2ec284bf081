"""Loops that nobody edited train within a budget by one line, with plain PyTorch's bits; and what is wrong is seen.

The loops are those of `bench/loops.py`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import loop_trials
from loop_trials import CRASH, IDENTICAL, OTHER_BITS, OVER, PLAIN_FAILS, REFUSED, UNPLANNED, Ran, judged, run
from loops_by_library import LOOPS
from loops_by_library.loop import Line, Loop, Trained

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
OWNED = 0.6
"""The budget, as a share of the bytes of weights, gradients and optimizer state."""

KNOWN = {
    "sft-qlora": REFUSED  # TRL's loss takes more than that in its backward
}
"""Loops that do not get their bits within the budget, and what becomes of them."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_with_the_bits_of_plain_pytorch_in_less_than_weights_and_state(name: str) -> None:
    if missing := LOOPS[name].missing:
        pytest.skip(f"{', '.join(missing)} not installed: make loops-libraries")
    plain = run(name, None)
    budget = int(OWNED * plain.owned_bytes)
    gc.collect()
    found = judged(name, str(budget), plain, run(name, budget))
    assert found.kind == KNOWN.get(name, IDENTICAL), f"{found.said}\n{found.traceback}"


# -- what is wrong is seen


def of(trains: Callable[[Line], Trained], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Ran]:
    """A run of a loop that only this test knows."""
    monkeypatch.setitem(LOOPS, "test", Loop("test", "tests", "", trains, ()))
    return lambda budget: run("test", budget)


def small(line: Line, *, learning_rate: float = 0.1, forgets: bool = False) -> Trained:
    original = model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    compiled = line.module(model)
    losses = []
    for _ in range(3):
        loss = (original if forgets else compiled)(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [original], [optimizer])


def test_a_run_says_what_it_took_and_that_all_steps_had_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    train = of(small, monkeypatch)
    plain, within = train(None), train("1GiB")
    weights = 4 * 2 * (64 * 64 + 64)
    assert (plain.weight_bytes, plain.gradient_bytes, plain.state_bytes) == (weights, weights, weights)
    assert (within.steps, within.unplanned_steps, within.plans) == (3, 0, 1)
    assert plain.owned_bytes <= plain.peak_bytes <= plain.owned_bytes + 64 * 1024
    assert judged("test", "1GiB", plain, within).kind == IDENTICAL


def test_other_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    train = of(lambda line: small(line, learning_rate=0.1 if line.budget is None else 0.2), monkeypatch)
    found = judged("test", "1GiB", train(None), train("1GiB"))
    assert found.kind == OTHER_BITS
    assert "figure 1" in found.said, "the first loss is that of the first weights"
    assert "group 0.0.lr" in found.said or "values differ" in found.said


def test_steps_without_a_plan_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # The check of the product itself would raise first.
    monkeypatch.setattr(loop_trials, "Line", lambda _, *rest: Line(None, *rest))
    train = of(small, monkeypatch)
    found = judged("test", "1GiB", train(None), train("1GiB"))
    assert (found.kind, found.unplanned_steps) == (UNPLANNED, 3)


def test_refusals_crashes_and_peaks_over_the_budget_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    train = of(small, monkeypatch)
    plain, within = train(None), train("1GiB")
    refused = train("1KiB")
    assert refused.floor_bytes > 1024
    assert judged("test", "1KiB", plain, refused).kind == REFUSED
    assert judged("test", "1GiB", plain, replace(within, budget_bytes=within.peak_bytes - 1)).kind == OVER
    assert judged("test", "1GiB", plain, "the process ended with -11").kind == CRASH
    assert judged("test", "1GiB", replace(plain, error="ValueError: no"), within).kind == PLAIN_FAILS


def test_two_optimizers_that_step_behind_one_backward_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(line: Line) -> Trained:
        original = model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        model = line.module(model)
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return Trained([], [original], optimizers)

    ran = of(two, monkeypatch)("1GiB")
    assert (ran.steps, ran.unplanned_steps) == (4, 0)
