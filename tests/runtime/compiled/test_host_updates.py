"""A plain loop whose optimizer updates on the host has the bits of plain PyTorch."""

from __future__ import annotations

from functools import partial
from threading import Event, current_thread
from typing import Any

import pytest
import torch
from tests.runtime.compiled.whole_budget_loops import OPTIMIZERS, Run, begin, compare, loss_of
from tests.turns import by_turns
from torch import nn

import overspill
from overspill.core import Verb
from overspill.core.errors import OverspillError
from overspill.runtime.step.updates import OptimizerUpdates

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]
SOON = 20.0


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overspill, "compile", partial(overspill.compile, update="host"))


def updates_on_host(run: Run) -> None:
    run.moves()
    if run.session is not None:
        assert run.session.plans[-1].schedule.counts[Verb.RUN_ON_HOST] == 12


@pytest.mark.short("adafactor-False", "adamw-True")
@pytest.mark.parametrize(("name", "clips"), by_turns(OPTIMIZERS, [False, True]))
def test_an_optimizer(name: str, clips: bool) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run, OPTIMIZERS[name])
        for i in range(4):
            loss = loss_of(compiled, i)
            loss.backward()
            run.see(loss)
            if clips:
                run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            updates_on_host(run)
            optimizer.zero_grad()

    compare(loop)


class Held:
    """Updates on the host that wait until they are let go, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes = Event()
        self.goes.set()
        self.fails: str | None = None
        self.ran: list[str] = []
        update = OptimizerUpdates.update

        def held(updates: OptimizerUpdates, owned: Any, *args: Any) -> None:
            if current_thread().name == "overspill-update":
                assert self.goes.wait(SOON)
                self.ran.append(owned.name.removeprefix("model."))
                if self.ran[-1] == self.fails:
                    raise ValueError("the optimizer's own")
            update(updates, owned, *args)

        monkeypatch.setattr(OptimizerUpdates, "update", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    monkeypatch.setattr("overspill.core.graph.SMALL_UPDATE_BYTES", 0)  # each has a call of its own
    return Held(monkeypatch)


def test_a_loop_goes_on_beside_updates(held: Held) -> None:
    """It sets another rate, drops gradients and draws a batch; a read of a count, a weight or a state dict waits."""

    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(7):
            loss = loss_of(compiled, i)
            loss.backward()
            if i > 1:
                held.goes.clear()
            before = len(held.ran)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.zero_grad(set_to_none=bool(i % 2))
            if run.session is not None and i > 1:
                assert len(held.ran) == before
            held.goes.set()
            if i % 3 == 0:
                run.see(*(state["step"] for state in optimizer.state.values()))
            elif i % 3 == 1:
                run.see(model[2].weight, optimizer.state[model[0].bias]["exp_avg"])
            else:
                run.see(*(of["step"] for of in optimizer.state_dict()["state"].values()), *model.state_dict().values())
            run.see(loss)

    compare(loop)


@pytest.mark.long
def test_gradients_are_added_up_and_read_behind_the_step() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(6):
            (loss_of(compiled, i) / 2).backward()
            if i % 2:
                optimizer.step()
                run.see(*(p.grad for p in model.parameters()))
                optimizer.zero_grad()

    compare(loop)


def test_a_step_of_some_parameters_that_no_plan_is_of(held: Held) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            loss = loss_of(compiled, i)
            loss.backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                model[2].weight.grad = None
            held.ran.clear()
            optimizer.step()
            optimizer.zero_grad()
            run.see(loss, *model.state_dict().values())
            if run.session is not None:
                assert len(held.ran) == 12 - i % 2

    compare(loop)


@pytest.mark.short("adamw")
@pytest.mark.parametrize("name", ["adamw", "fused"])
def test_steps_that_a_scaler_skips(name: str) -> None:
    """A fused optimizer has the scale, and skips the step itself."""
    skipped = []

    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run, OPTIMIZERS[name])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        for i in range(7):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(compiled, i)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < scale)
            optimizer.zero_grad()
            run.see(loss, *(model.state_dict().values() if i == 5 else ()))

    compare(loop)
    assert 0 < sum(skipped) < len(skipped)


def test_an_update_that_fails_is_told_at_the_next_call(held: Held) -> None:
    run = Run("45%", "host")
    _, compiled, optimizer = begin(run)
    for i in range(4):
        loss_of(compiled, i).backward()
        if i == 3:
            held.fails = "2.weight"
            held.goes.clear()
        optimizer.step()
        optimizer.zero_grad()
    held.goes.set()
    with pytest.raises(ValueError, match="own") as told:
        loss_of(compiled, 4)
    assert "updating 2.weight" in told.value.__notes__[0]
    with pytest.raises(OverspillError, match="load"):
        loss_of(compiled, 4)
