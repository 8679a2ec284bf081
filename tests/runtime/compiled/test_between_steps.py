"""What loops do with weights and state between steps, at budgets below these, is as in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
from tests.runtime.compiled.whole_budget_loops import OPTIMIZERS, WIDTH, Run, batch, begin, compare, loss_of, step
from torch import nn

import overspill
from overspill.core.errors import RequestError

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]

either_way = pytest.mark.parametrize("how", ["compile", pytest.param("by name", marks=pytest.mark.long)])


def test_weights_and_state_are_read_and_written_between_steps() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        mean = [p.detach().clone() for p in model.parameters()]
        for i in range(6):
            run.see(loss_of(compiled, i).backward())
            with torch.no_grad():
                run.see(sum(p.norm() for p in model.parameters()))
            optimizer.step()
            run.moves()
            with torch.no_grad():
                for p, m in zip(model.parameters(), mean, strict=True):
                    if i == 1:
                        p.data.mul_(0.5)
                    if i == 2:
                        p.add_(0.01)
                    m.lerp_(p, 0.1)
            if i == 3:
                model[0].weight.data = torch.full((WIDTH, WIDTH), 0.02)
            if i == 4:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            optimizer.zero_grad()
        run.see(*mean)

    compare(loop)


@pytest.mark.long
def test_weights_that_share_a_larger_memory_get_another_plan() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            compiled(batch(i, 4 if i < 3 else 5)).square().mean().backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            if i == 1:
                found = nn.utils.parameters_to_vector(model.parameters()).detach()
                nn.utils.vector_to_parameters(found * 0.9, model.parameters())

    compare(loop)


class Levels(torch.optim.Optimizer):
    """Steps by one of a few levels, in a table that it keeps for all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(self.table[(mean.clamp(-1, 1) * 127 + 128).long()], alpha=group["lr"])


@pytest.mark.long
def test_an_optimizer_that_keeps_a_table_of_its_own() -> None:
    def loop(run: Run) -> None:
        _, compiled, _ = begin(run, Levels)
        for i in range(4):
            step(run, compiled, i)

    compare(loop, "60%")


def test_a_weight_that_is_away_takes_the_values_of_another_that_is_away() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(3):
            loss_of(compiled, i).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one, other in zip(model[::4], model[2::4], strict=True):
                    one.weight.copy_(other.weight)  # type: ignore[operator, union-attr]
            run.moves()

    compare(loop)


@pytest.mark.short("copies")
@pytest.mark.parametrize("how", ["copies", "reads", "asks", "leaves"])
def test_what_the_loops_own_code_leaves_beyond_the_budget_is_told_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As SAM does, which copies all weights into the optimizer's state between two calls of the model."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = overspill.compile(model, budget="150KiB", store="host")
    for _ in range(4):
        compiled(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters() if how in ("copies", "reads") else ():
            values = parameter.detach().clone()
            if how == "copies":
                optimizer.state[parameter]["old"] = values
        if how == "asks":
            compiled.overspill.synchronize()
    told = [r.getMessage() for r in caplog.records if "own code" in r.getMessage()]
    assert len(told) == (how == "copies")
    assert all("old 97.5 KiB" in text for text in told)


@pytest.mark.long
def test_a_view_of_a_weight_is_kept_from_some_step_on() -> None:
    def loop(run: Run) -> None:
        model, compiled, _ = begin(run)
        row = torch.zeros(())
        for i in range(5):
            step(run, compiled, i)
            if i == 1:
                row = model[2].weight.detach()[3]
            row.mul_(0.5)
            run.see(row)

    compare(loop, "60%")


@either_way
def test_state_dicts_and_copies_in_the_middle(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        saved = io.BytesIO()
        for i in range(5):
            step(run, compiled, i)
            if i == 1:
                torch.save((model.state_dict(), optimizer.state_dict()), saved)
            if i == 2:
                weights, state = torch.load(io.BytesIO(saved.getvalue()))
                run.see(*weights.values())
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            if i == 3:
                other, its = copy.deepcopy((model, optimizer))
                loss_of(other, 9).backward()
                its.step()
                run.see(*other.parameters())

    compare(loop, "45%", "disk", how=how)


@pytest.mark.long
def test_by_name_models_of_one_class_with_equal_options_each_move_their_own() -> None:
    def loop(run: Run) -> None:
        pairs = [begin(run) for _ in range(2)]
        for i in range(6):
            model, compiled, optimizer = pairs[i % 2]
            loss_of(compiled, i).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.see(*model.parameters())
        run.moves()

    compare(loop, how="by name")


@either_way
def test_freezing_and_unfreezing(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, _ = begin(run)
        for i in range(6):
            if i in (2, 4):
                model[0].requires_grad_(i == 4)
            step(run, compiled, i)

    compare(loop, "60%", how=how)


def test_the_session_brings_all_back_and_ends_and_the_loop_goes_on() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            if run.session is not None and i == 1:
                run.session.synchronize()
            loss_of(compiled, i).backward()
            if i == 2:
                with contextlib.nullcontext() if run.session is None else run.session.paused():
                    model[0].weight.data.mul_(0.9)
            if run.session is not None and i == 3:
                run.session.close()
                compiled = model
            run.see(*(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    compare(loop)


@pytest.mark.long
@either_way
def test_parameters_get_another_dtype(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run, OPTIMIZERS["sgd"])
        for i in range(5):
            if i == 2:
                model.double()
                optimizer = OPTIMIZERS["sgd"](model.parameters())
                run.optimizers = [optimizer]
            run.see(compiled(batch(i).to(model[0].weight.dtype)).square().mean().backward())
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "60%", how=how)


@pytest.mark.long
def test_a_parameter_that_gets_another_dtype_before_its_update_is_refused_in_words_of_the_loop() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = overspill.compile(model, budget="130KiB", store="host")
    for i in range(2):
        compiled(torch.ones(4, 64)).sum().backward()
        if i:
            model[0].weight.data = model[0].weight.data.double()
            with pytest.raises(RequestError, match=r"next call$"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
