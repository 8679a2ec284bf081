"""`overspill.record` round some steps of a loop of one's own: what it gives, that it changes no number, and that it leaves nothing."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.tracing.format import counted, named, of_process, read_trace
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import overspill
from overspill.core import Phase, TensorKind, Verb
from overspill.errors import RequestError, StoreError
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.report.recording import Recording
from overspill.report.tracing.plan_trace import LIVE
from overspill.report.tracing.run_trace import MEASURED
from overspill.runtime.compiled.cut_calls import _step_ends
from overspill.runtime.reachable import same_bits
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.step.train_step import TrainStep

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
BATCH = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
DOORS = ["compile", "train_step"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))


class Loop:
    """A loop of one's own through one of the doors, that notes its losses."""

    def __init__(self, door: str, backend: str = "eager", **asked: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.losses: list[float] = []
        asked = {"budget": 0.8, "store": "host", "backend": backend} | asked
        if backend == "inductor":
            asked["partition"] = 1.0  # one, which is compiled once
        self.door = door
        self.trained: Any
        if door == "compile":
            self.trained = overspill.compile(self.model, **asked)
        else:
            self.trained = overspill.train_step(self.model, mean_square, self.optimizer, **asked)

    def once(self) -> Tensor:
        return self._compiled() if self.door == "compile" else self.trained(BATCH)

    def _compiled(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.trained(BATCH).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int) -> None:
        self.losses += [self.once().item() for _ in range(count)]

    def state(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def same_as(self, other: Loop) -> bool:
        pairs = zip(self.state(), other.state(), strict=True)
        return self.losses == other.losses and all(same_bits(a, b) for a, b in pairs)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def check_files(recording: Recording, folder: Path) -> None:
    """What it writes is in order, and says what the record says."""
    record = recording.record
    recording.trace(folder / "run.json")
    events = read_trace(folder / "run.json")
    measured = of_process(events, MEASURED)
    assert sum(e.get("cat") == "step" for e in measured) == len(record.steps)
    assert max(counted(measured, LIVE)) == recording.peak_bytes > 0
    for verb, copies in record.copies.items():
        assert sum(e.get("cat") == verb for e in measured) == len(copies) > 0
    assert {name.partition(":")[0] for name in named(events, "process_name")} == {"simulated", "measured"}
    recording.snapshot(folder / "run.pickle")
    replayed = replay_snapshot(read_snapshot(folder / "run.pickle"))
    assert replayed.equal
    assert replayed.peak_requested_bytes == recording.peak_bytes
    recording.report(folder / "run.html")
    assert '"measured":true' in (folder / "run.html").read_text(encoding="utf-8")


@pytest.mark.short("train_step-eager")
@pytest.mark.parametrize(
    ("door", "backend"),
    [
        ("compile", "eager"),
        ("train_step", "eager"),
        *(pytest.param(door, "inductor", marks=pytest.mark.long) for door in DOORS),
    ],
)
def test_steps_of_plans_that_are_there_already_are_recorded_and_no_number_changes(
    door: str, backend: str, tmp_path: Path
) -> None:
    ours, plain = Loop(door, backend), Loop(door, backend)
    ours.steps(2)
    plans = list((ours.trained if door == "train_step" else ours.trained.overspill).plans)
    for _ in range(2):  # one behind the other
        with overspill.record(ours.trained, steps=2) as recording:
            ours.steps(3)
        assert len(recording.step_seconds) == 2
        assert [facts.plans for facts in recording.record.facts] == [False, False]
        assert all(a is b for a, b in zip(recording.plans, plans, strict=True)), "nothing is planned anew"
        check_files(recording, tmp_path)
    ours.steps(1)
    plain.steps(9)
    assert ours.same_as(plain)
    (plan,) = plans
    counts, record = plan.schedule.counts, recording.record
    assert {verb: len(copies) for verb, copies in record.copies.items()} == {v: 2 * counts[v] for v in record.copies}
    assert recording.offloaded_bytes == [plan.offloaded_bytes] * 2
    assert recording.prefetched_bytes == [plan.prefetched_bytes] * 2
    assert all(waited >= 0 for waited in recording.waited_seconds)
    # Each op of forward and backward that runs, once a step; updates of a whole step may be one call.
    ran = [thing.label for thing in record.within(record.compute, 1) if thing.is_op and thing.label is not None]
    wanted = [i.target for i in plan.schedule.instructions if i.verb in (Verb.RUN, Verb.RECOMPUTE)]
    before_updates = [op for op in wanted if plan.graph.ops[op].phase is not Phase.UPDATE and runs(plan, op)]
    assert [label.target for label in ran if label.graph.ops[label.target].phase is not Phase.UPDATE] == before_updates
    updated = sum(1 + label.others for label in ran if label.graph.ops[label.target].phase is Phase.UPDATE)
    assert updated == (8 if door == "train_step" else 0)


def runs(plan: Any, op: int) -> bool:
    """Whether an op of the plan is something that runs, and not a note of what autograd or the loop does."""
    name = plan.graph.ops[op].name
    return not name.startswith(("step.", "autograd.")) or plan.graph.ops[op].phase is Phase.UPDATE


def test_the_peak_that_is_recorded_is_that_of_the_plan_and_what_it_says_is_short(tmp_path: Path) -> None:
    loop = Loop("train_step")
    with overspill.record(loop.trained) as recording:
        loop.steps(2)
    (plan,) = recording.plans
    assert 0.98 * plan.peak_bytes - 4608 <= recording.peak_bytes <= plan.peak_bytes
    assert [facts.plans for facts in recording.record.facts] == [True, False]
    assert recording.usual_step_seconds == recording.step_seconds[1]
    assert str(recording).startswith("2 steps recorded\n  usual step: ")
    assert "2 steps recorded" in recording._repr_html_()
    recording.report(tmp_path / "run.html", title="my run")
    assert '"title":"my run"' in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_micro_batches_are_one_step_of_two_plans(tmp_path: Path) -> None:
    ours, plain = (Loop("train_step", accumulate=2) for _ in range(2))
    with overspill.record(ours.trained) as recording:
        ours.steps(2)
    plain.steps(2)
    assert ours.same_as(plain)
    assert len(recording.step_seconds) == 2
    assert len(recording.plans) == 2
    check_files(recording, tmp_path)
    recording.trace(tmp_path / "run.json")
    assert [n.partition(":")[0] for n in named(read_trace(tmp_path / "run.json"), "process_name")] == [
        "simulated", "measured", "simulated",
    ]  # fmt: skip


def in_turns(models: list[nn.Module], calls: list[Any], step: Callable[[Tensor], Tensor]) -> list[float]:
    """The losses of one round: the first models are called as `calls` have it, the last takes a `step`."""
    losses = []
    for model, call in zip(models, calls, strict=False):
        model.zero_grad()
        loss = call(BATCH).square().mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        losses.append(loss.item())
    return [*losses, step(BATCH).item()]


@pytest.mark.long
def test_all_models_of_a_session_are_recorded(tmp_path: Path) -> None:
    session = overspill.Session(budget="64MiB", policy="vdnn-all", store="host")
    models, plain = [net() for _ in range(3)], [net() for _ in range(3)]
    compiled = [overspill.compile(model, session=session) for model in models[:2]]
    step = overspill.train_step(models[2], mean_square, torch.optim.SGD(models[2].parameters(), 0.1), session=session)

    def plain_step(x: Tensor) -> Tensor:
        plain[2].zero_grad()
        loss = mean_square(plain[2], x)
        loss.backward()
        torch.optim.SGD(plain[2].parameters(), 0.1).step()
        return loss

    losses = [in_turns(models, compiled, step)]
    with overspill.record(session) as recording:
        losses += [in_turns(models, compiled, step) for _ in range(2)]
    assert losses == [in_turns(plain, plain[:2], plain_step) for _ in range(3)]
    assert len(recording.step_seconds) == 6
    assert {id(plan) for plan in recording.plans} == {id(p) for p in (*session.plans, *step.plans)}
    check_files(recording, tmp_path)
    with overspill.record(compiled[1]) as again:  # by one of them, it is the same session
        in_turns(models, compiled, step)
    assert len(again.step_seconds) == 3


def test_a_module_with_a_compiled_one_inside_is_recorded() -> None:
    inner = overspill.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), budget="1GiB", store="host")
    outer = nn.Sequential(inner, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    with overspill.record(outer) as recording:
        outer(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.step()  # of the same step
    assert len(recording.step_seconds) == 1
    assert recording.title == "Sequential, policy auto, eager backend"


@pytest.mark.long
def test_what_is_evaluated_is_a_step_in_part_as_no_optimizer_ends_it() -> None:
    loop = Loop("compile")
    loop.steps(1)
    with overspill.record(loop.trained) as recording, torch.no_grad():
        loop.trained(BATCH)
        loop.trained(BATCH)
    assert [facts.is_whole for facts in recording.record.facts] == [False]
    assert len(recording.plans) == 1


# -- it ends


def left_behind(loop: Loop) -> list[Any]:
    """What a recording has put anywhere."""
    source = loop.trained if isinstance(loop.trained, TrainStep) else loop.trained.overspill
    assert source.engine is not None
    updates = {_step_ends}  # what moves weights does so for good
    return [
        *(x for x in (source.recorder, source.tracker, source.engine.recorder) if x is not None),
        *(hook for hook in _global_optimizer_post_hooks.values() if hook not in updates),
    ]


@pytest.mark.short("compile")
@pytest.mark.parametrize("door", DOORS)
def test_when_it_ends_nothing_of_it_is_left(door: str) -> None:
    loop = Loop(door)
    loop.steps(2)
    made: list[weakref.ref[Any]] = []
    with overspill.record(loop.trained) as recording:
        loop.steps(2)
        assert left_behind(loop)
        made += map(weakref.ref, (left_behind(loop)[0], recording))
    assert left_behind(loop) == []
    made.append(weakref.ref(recording.record))
    gc.collect()
    assert made[0]() is None
    del recording
    gc.collect()
    assert [ref() for ref in made] == [None] * 3


@pytest.mark.long
def test_a_record_of_some_steps_does_not_grow_in_forty() -> None:
    loop = Loop("compile")
    loop.steps(2)
    with overspill.record(loop.trained, steps=2) as recording:
        loop.steps(4)
        assert not any(isinstance(x, RunRecorder) for x in left_behind(loop)), "it is over, and plain graphs run"
        gc.collect()
        before = len(gc.get_objects())
        loop.steps(40)
        gc.collect()
        assert len(gc.get_objects()) < before + 200
    assert len(recording.step_seconds) == 2
    assert {change.step for change in recording.record.changes} <= {0, 1, 2}


@pytest.mark.long
def test_a_record_that_is_full_says_so_and_keeps_what_came_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("overspill.callbacks.recording.RunRecorder", partial(RunRecorder, most_entries=150))
    loop, plain = Loop("train_step"), Loop("train_step")
    loop.steps(1)
    with pytest.warns(UserWarning, match="full after 2"):  # noqa: SIM117
        with overspill.record(loop.trained) as recording:
            loop.steps(5)
    plain.steps(6)
    assert loop.same_as(plain)
    assert [facts.is_whole for facts in recording.record.facts] == [True, False]
    check_files(recording, tmp_path)


# -- trouble


@pytest.mark.long
def test_an_error_inside_ends_it_and_training_goes_on() -> None:
    ours, plain = Loop("compile"), Loop("compile")
    ours.steps(1)
    with pytest.raises(ValueError, match="the user's own"), overspill.record(ours.trained) as recording:  # noqa: PT012
        ours.steps(1)
        raise ValueError("the user's own")
    assert left_behind(ours) == []
    assert len(recording.step_seconds) == 1, "what came before it can be looked at"
    ours.steps(2)
    plain.steps(4)
    assert ours.same_as(plain)


@pytest.mark.short("False")
@pytest.mark.parametrize("inside", [True, False])
def test_a_step_that_the_store_has_stopped_goes_on_with_the_same_bits(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the recording, or behind it: an instruction has the same place in both forms of the program."""
    ours, plain = Loop("train_step"), Loop("train_step")
    ours.steps(1)
    store = ours.trained.engine.store
    write, calls = store.write, []

    def failing(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise StoreError("the disk is full")
        write(*args)

    monkeypatch.setattr(store, "write", failing)
    with overspill.record(ours.trained) as recording:
        with pytest.raises(StoreError, match="disk is full"):
            ours.steps(1)
        if inside:
            ours.losses.append(ours.trained.resume().item())
    if not inside:
        ours.losses.append(ours.trained.resume().item())
    ours.steps(1)
    plain.steps(3)
    assert ours.same_as(plain)
    assert [facts.is_whole for facts in recording.record.facts] == [inside]


def test_what_cannot_be_recorded_is_said_in_a_line() -> None:
    loop = Loop("train_step")
    with pytest.raises(RequestError, match="Linear"), overspill.record(nn.Linear(2, 2)):
        pass
    with pytest.raises(RequestError, match="steps=0"), overspill.record(loop.trained, steps=0):
        pass
    with overspill.record(loop.trained) as recording:
        with pytest.raises(RequestError, match="under way"):
            recording.trace("run.json")
        with pytest.raises(RequestError, match="being recorded already"), overspill.record(loop.trained):
            pass
    with pytest.raises(RequestError, match="nothing was recorded"):
        recording.report("run.html")
    assert left_behind_of(loop) == []


def left_behind_of(loop: Loop) -> list[Any]:
    return [x for x in (loop.trained.recorder, loop.trained.tracker) if x is not None]


def test_what_is_on_the_device_between_steps_is_known_by_kind() -> None:
    loop = Loop("compile")
    loop.steps(2)
    with overspill.record(loop.trained) as recording:
        loop.steps(1)
    of_kind: dict[TensorKind | None, int] = {}
    for change in recording.record.changes:
        if change.nbytes > 0 and change.label is None:
            of_kind[change.kind] = of_kind.get(change.kind, 0) + change.nbytes
    weights = sum(p.nbytes for p in loop.model.parameters())
    assert of_kind[TensorKind.GRADIENT] == weights  # of the step before
    assert of_kind[TensorKind.OPTIMIZER_STATE] == 2 * weights + 8 * 4  # and as many counts of steps
    assert math.isclose(of_kind.get(None, 0), 0)
