"""A train step in which values of parameters choose rows (experts by `nonzero()`): planned by a bound, with plain's bits."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import InfeasibleBudgetError, UnsupportedError
from overspill.runtime.step.train_step import TrainStep


class Routed(nn.Module):
    """Rows go to the experts that the first column of the input names; a step draws, and changes buffers."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.gate = nn.Linear(16, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.first(x)), 0.1)
        score = self.gate(h).sigmoid()
        chosen = (x[:, 0] + 0 * score.detach()[:, 0]).round()  # which follows from parameters, as far as one can see
        made = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            made = made.index_add(0, rows, expert(h.index_select(0, rows)) * score[rows])
        return self.last(h + made)


def batch(*rows: int, size: int = 64) -> Tensor:
    """Return a batch of which so many rows go to each expert, and the others to none."""
    made = torch.randn(size, 8)
    chosen = [expert for expert, count in enumerate(rows) for _ in range(count)]
    made[:, 0] = torch.tensor(chosen + [-1] * (size - len(chosen)))
    return made


def trained(
    batches: list[Tensor], step_of: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], Any]]
) -> Any:
    """Train on the batches; return the losses, what the model and its optimizer are then, and the generator's states."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = step_of(model, optimizer)
    torch.manual_seed(1)
    done = [(step(each), torch.get_rng_state()) for each in batches]
    return done, [*model.state_dict().values()], optimizer.state_dict()["state"]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def planned(budget: str, made: list[TrainStep]) -> Callable[[nn.Module, torch.optim.Optimizer], TrainStep]:
    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainStep:
        made.append(overspill.train_step(model, mean_square, optimizer, budget=budget, store="host"))
        return made[0]

    return step_of


FEW, ODD, MANY, MOST = (4, 4), (1, 2), (20, 4), (30, 30)


@pytest.mark.short("smallest")
@pytest.mark.parametrize("budget", ["smallest", "30KiB", "50%"])
def test_experts_train_by_plans_for_a_bound_on_their_rows_and_steps_over_it_begin_again(budget: str) -> None:
    torch.manual_seed(0)
    batches = [batch(*FEW), batch(5, 4), batch(*ODD, size=7), batch(*MANY), batch(*MANY), batch(*MOST), batch(0, 3)]
    batches += [batch(*FEW), batch(*ODD, size=7)]
    made: list[TrainStep] = []
    over, peaks, budgets = [], [], []

    def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        step = planned(budget, made)(model, optimizer)

        def run(x: Tensor) -> Any:
            with step.counted((x,)) as peak:
                loss = step(x)
            over.append(step.steps_over)
            peaks.append(peak[0])
            budgets.append(max((plan.asked_bytes for plan in step.plans), default=0))
            return loss

        return run

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.testing.assert_close(trained(batches, counted), trained(batches, plain), rtol=0, atol=0)
    assert over == [0, 0, 0, 1, 1, 2, 2, 2, 2], "20 rows of one expert, then 30 of both, where 5 and 25 were known"
    assert ["begins again" in str(warning.message) for warning in told] == [True] * 2
    # By a bound from the first step, or for all rows of a small batch; then larger ones, and exactly no rows.
    bounds = [of.rows.bounds for known in made[0]._plans._compiled.values() for of in known if of.rows is not None]
    share = [[0, 38], [1, 3], [2, 3], [38, 38]]  # with its growth, plans for less are made again
    every = [[0, 38], [1, 3], [5, 5], [7, 7], [25, 5], [38, 5], [38, 38]]
    assert sorted(bounds) == (share if budget == "50%" else every)
    # Trials of ops come with the first plans; steps that were over take no more than the budget.
    assert all(map(operator.le, peaks[3:6], budgets[3:6])), (peaks, budgets)
    # A share is of what steps choose, not of the first one's plan, in which every expert could have all rows.
    assert max(budgets) < 0.7 * max(plan.unmanaged_peak_bytes for plan in made[0].plans), budgets


def test_a_step_whose_rows_have_no_plan_within_the_budget_is_not_done_and_others_follow() -> None:
    torch.manual_seed(0)
    batches = [batch(*FEW), batch(*FEW), batch(1, 60), batch(*FEW)]
    made: list[TrainStep] = []

    def guarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        step = planned("30KiB", made)(model, optimizer)

        def run(x: Tensor) -> Any:
            if x is not batches[2]:
                return step(x)
            with pytest.warns(UserWarning, match="60 rows"), pytest.raises(InfeasibleBudgetError, match="nothing of"):
                step(x)
            return None

        return run

    def skipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        step = plain(model, optimizer)
        return lambda x: None if x is batches[2] else step(x)

    torch.testing.assert_close(trained(batches, guarded), trained(batches, skipping), rtol=0, atol=0)
    assert not made[0].is_unfinished


class Capacity(Routed):
    """Takes another way with more than eight rows; `counts` asks for the very number."""

    counts = False

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] + 0 * self.gate(self.first(x)).detach()[:, 0]).round()
        rows = chosen == 1  # a mask
        of = self.experts[0](self.first(x)[rows])
        return of * 2 if (len(of) if self.counts else of.shape[0]) > 8 else of - 1


@pytest.mark.long
def test_branches_by_the_number_of_rows_are_taken_as_in_plain_pytorch() -> None:
    def run(kind: str, *, counts: bool = False) -> Any:
        torch.manual_seed(0)
        model = Capacity()
        model.counts = counts
        optimizer = torch.optim.SGD(model.parameters())
        made: list[TrainStep] = []
        step = plain(model, optimizer) if kind == "plain" else planned("1MiB", made)(model, optimizer)
        torch.manual_seed(1)
        losses = [step(batch(0, rows)) for rows in (12, 3, 11, 4, 20, *range(2, 12 if counts else 2))]
        return losses, sum(len(known) for known in made[0]._plans._compiled.values()) if made else 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, count = run("planned")
        assert losses == run("plain")[0]
        assert count == 4, "for each way, and for more rows"
        with pytest.raises(UnsupportedError, match="another way"):
            run("planned", counts=True)
