"""Updates on the host, as a schedule asks for them: the bits of plain PyTorch, in a thread beside the step."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Cnn, Lm, Mlp, Pair, batch_for, cross_entropy
from torch import nn

import overspill
from overspill.core import Phase, Stream, Verb
from overspill.core.errors import RequestError, StoreError
from overspill.report.page.measured import measured_step
from overspill.runtime.step import updates
from overspill.runtime.step.updates import OptimizerUpdates
from overspill.runtime.transfer.host_lane import HostLane, HostUpdate
from overspill.runtime.transfer.host_store import HostStore

SMALL = "overspill.core.graph.SMALL_UPDATE_BYTES"
SOON = 20.0
"""Seconds after which something that is waited for does not come."""


def pair_on_host(model: type = Mlp, optimizer: str = "adamw", **how: Any) -> Pair:
    options = {"policy": "auto", "update": "host", "budget": "70%"} | how.pop("options", {})
    return Pair(model, OPTIMIZERS[optimizer], options=options, **how)


class Watched:
    """The updates that run, each of which first calls `before` with its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, str]] = []
        self.before: Any = lambda _: None
        update = OptimizerUpdates.update

        def watched(updates: OptimizerUpdates, owned: Any, *args: Any) -> None:
            self.ran.append((owned.name.removeprefix("model."), current_thread().name))
            self.before(self.ran[-1][0])
            update(updates, owned, *args)

        monkeypatch.setattr(OptimizerUpdates, "update", watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(SMALL, 0)  # each has a call of its own
    return Watched(monkeypatch)


@pytest.mark.short("adafactor", "adamw", "momentum", "adamw, fused")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer(optimizer: str) -> None:
    pair = pair_on_host(optimizer=optimizer)
    pair.train(4)
    (plan,) = pair.step.plans
    assert plan.schedule.counts[Verb.RUN_ON_HOST] == 8
    pair.assert_same()
    pair.train(2)
    pair.step.close()
    pair.assert_same()


@pytest.mark.short("Mlp-gradients1")
@pytest.mark.parametrize(
    ("model", "gradients"),
    [
        (Cnn, {"clip_value": 1e-3}),
        (Mlp, {"accumulate": 2, "clip_norm": 0.1}),
        pytest.param(Lm, {"accumulate": 2, "clip_norm": 0.1}, marks=pytest.mark.long),
    ],
)
def test_a_model(model: type, gradients: dict[str, Any]) -> None:
    pair = pair_on_host(model, gradients=gradients, options={"store": "disk", "checksum": True, "budget": "90%"})
    pair.train(3)
    assert sum(plan.schedule.counts[Verb.RUN_ON_HOST] for plan in pair.step.plans) > 4
    pair.assert_same()


def test_small_updates_share_calls_and_one_that_fails_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's fused kernel gets eight parameters at once; with a lower limit, the four biases."""
    calls: list[int] = []
    step = updates.plain_step

    def counted(optimizer: torch.optim.Optimizer) -> None:
        calls.append(sum(len(group["params"]) for group in optimizer.param_groups))
        step(optimizer)

    monkeypatch.setattr(updates, "plain_step", counted)
    pair = pair_on_host(optimizer="adamw, fused")
    pair.train(3)
    pair.assert_same()
    assert calls == [8, 8, 8]
    (plan,) = pair.step.plans
    assert len(plan.schedule.joined(plan.graph)) == 7
    moved = sorted(plan.graph.moved_on_host_bytes(op) for op in plan.graph.ops if op.phase is Phase.UPDATE)

    def fails(_: torch.optim.Optimizer) -> None:
        raise ValueError("no such rate")

    monkeypatch.setattr(updates, "plain_step", fails)
    pair.step(*pair.inputs)
    with pytest.raises(ValueError, match="no such rate") as caught:
        pair.step.close()
    assert any("and 3 others, which may be updated in part" in note for note in caught.value.__notes__)

    monkeypatch.setattr(updates, "plain_step", counted)
    monkeypatch.setattr(SMALL, moved[3])
    calls.clear()
    pair = pair_on_host(optimizer="adamw, fused")
    pair.train()
    pair.assert_same()
    assert sorted(calls) == [1, 1, 1, 1, 4]


def test_updates_run_beside_backward(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for gradients that backward makes later."""
    pair = pair_on_host()
    pair.train()
    pair.assert_same()
    later, write, count = Event(), HostStore.write, 0

    def written(store: HostStore, *args: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            later.set()
        write(store, *args)

    def waits(_: str) -> None:
        assert later.wait(SOON)

    monkeypatch.setattr(HostStore, "write", written)
    watched.before = waits
    watched.ran.clear()
    pair.train()
    pair.assert_same()
    assert {thread for _, thread in watched.ran} == {"overspill-update"}
    assert [name for name, _ in watched.ran][::7] == ["last.weight", "first.weight"]


def test_updates_go_on_when_the_step_is_over_and_everyone_waits_for_them(watched: Watched) -> None:
    """A scheduler sets another rate meanwhile, as it does behind the step of a plain loop."""
    pair = pair_on_host()
    pair.train()
    pair.assert_same()
    goes = Event()
    watched.before = lambda _: goes.wait(SOON)
    for rate in (0.1, 0.5, 0.02):
        pair.train()
        assert not goes.is_set()
        for optimizer in (pair.optimizer, pair.plain.optimizer):
            optimizer.param_groups[0]["lr"] = rate
        goes.set()
        pair.assert_same()
        goes.clear()
    pair.train()
    goes.set()
    pair.train()
    pair.step.close()
    pair.assert_same()


def test_a_recording_has_them(watched: Watched, tmp_path: Path) -> None:
    pair = pair_on_host()
    pair.train(2)
    pair.assert_same()
    watched.ran.clear()
    with overspill.record(pair.step) as recording:
        pair.train(2)
        pair.assert_same()
    of = [update.label for update in recording.record.updates]
    assert len(of) == len(watched.ran) == 16
    assert all(of_update is not None and of_update.verb is Verb.RUN_ON_HOST for of_update in of)
    recording.trace(tmp_path / "run.json")
    assert Stream.HOST_UPDATE.value in (tmp_path / "run.json").read_text()
    assert Stream.HOST_UPDATE.value in measured_step(recording.record, "mlp").runs[-1].streams


def test_a_fork_waits_for_updates(watched: Watched) -> None:
    pair = pair_on_host()
    pair.train()
    watched.before = lambda _: Event().wait(0.02)
    pair.train()
    if (child := os.fork()) == 0:
        os._exit(bool(pair.differences()))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("in_step", [True, False])
def test_an_update_that_fails_is_told_with_what_it_has_stopped(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, in_step: bool
) -> None:
    """By the step itself, or by the next one, which has done nothing then."""
    pair = pair_on_host()
    pair.train(2)
    pair.assert_same()
    over, submit = Event(), HostLane.submit

    def fail(name: str) -> None:
        assert name == "last.weight"
        assert in_step or over.wait(SOON)
        raise ValueError("the optimizer's own")

    def submitted(lane: HostLane, update: HostUpdate) -> None:
        submit(lane, update)
        if in_step:  # the next one finds the error, however late the thread begins
            update.wait()

    def step() -> None:
        pair.step(*pair.inputs)
        over.set()
        pair.step(*pair.inputs)

    watched.ran.clear()
    watched.before = fail
    monkeypatch.setattr(HostLane, "submit", submitted)
    with pytest.raises(ValueError, match="own") as told:
        step()
    assert "updating last.weight" in told.value.__notes__[0]
    assert pair.step.is_unfinished == in_step
    if in_step:
        with pytest.raises(RequestError, match=r"abandon\(\)"):
            pair.model.state_dict()
        pair.step.abandon()
    else:
        assert "has not updated last.bias, middle.2.weight" in told.value.__notes__[0]
    watched.before = lambda _: None
    pair.model.load_state_dict(pair.plain.model.state_dict())
    pair.optimizer.load_state_dict(copy.deepcopy(pair.plain.optimizer.state_dict()))
    pair.train(2)
    pair.assert_same()


def test_whoever_reads_gets_the_error_of_an_update(watched: Watched) -> None:
    pair = pair_on_host()
    pair.train(2)
    pair.assert_same()
    over = Event()

    def fail(_: str) -> None:
        assert over.wait(SOON)
        raise StoreError("no memory")

    watched.before = fail
    pair.step(*pair.inputs)
    over.set()
    with pytest.raises(StoreError, match="no memory"):
        pair.model.state_dict()
    pair.step.close()


def test_updates_that_cannot_be_on_the_host_are_named() -> None:
    """A weight whose elements have gaps between them does not move."""
    model = Mlp()
    model.middle[0].weight = nn.Parameter(model.middle[0].weight.detach().repeat(2, 1)[::2])
    optimizer = torch.optim.AdamW(model.parameters())
    step = overspill.train_step(model, cross_entropy, optimizer, budget="70%", store="host", update="host")
    with pytest.warns(UserWarning, match="0.weight stay"):
        step(*batch_for(model))
    assert step.plans[0].schedule.counts[Verb.RUN_ON_HOST] == 7


class Coupled(torch.optim.Optimizer):
    """An optimizer of one's own, which updates parameters by the norm of all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.sub_(mean.mul_(0.9).add_(p.grad / (1 + total)), alpha=self.param_groups[0]["lr"])


@pytest.mark.long
def test_an_optimizer_of_ones_own_that_updates_all_at_once() -> None:
    pair = Pair(make_optimizer=Coupled, options={"policy": "auto", "update": "host", "budget": "80%"})
    pair.train(4)
    assert pair.step.plans[0].schedule.counts[Verb.RUN_ON_HOST] == 1
    pair.assert_same()
