"""A recording on a real device: the same bits, copies beside ops as the profiler has them, and PyTorch's own snapshot. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.tracing.format import counted, of_process, read_trace
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import overspill
from overspill.core import Verb
from overspill.job import Job
from overspill.models import load
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.report.recording import Recording
from overspill.report.tracing.plan_trace import LIVE
from overspill.report.tracing.run_trace import MEASURED
from overspill.runtime.options import Options
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.training import train, train_plain

pytestmark = pytest.mark.gpu

STEPS = 3
WIDTH, ROWS = 2048, 8192


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("whole_step", [False, True])
def test_a_recorded_run_has_the_bits_of_plain_training(whole_step: bool, backend: str) -> None:
    job = Job(lambda: load("gpt2", small=True), 16, "momentum")
    options = Options(budget="smallest", backend=backend, whole_step=whole_step)
    recorder = RunRecorder(by_hand=True, snapshot=True)
    managed = train(job, options, recorder=recorder, steps=STEPS, device="cuda")
    assert managed.identical_to(train_plain(job, options, partition=managed.partition, steps=STEPS, device="cuda"))
    assert managed.record is not None
    assert len(managed.record.steps) == STEPS
    assert managed.record.device_snapshot is not None


class Loop:
    """Layers that are large enough for kernels and copies to take milliseconds."""

    def __init__(self, door: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.x = torch.randn(ROWS, WIDTH, device="cuda")
        asked: dict[str, Any] = {"budget": 0.9, "policy": "vdnn-all"}
        if door == "train_step":
            self.source: Any = overspill.train_step(self.model, self.loss, self.optimizer, **asked)
        else:
            self.source = overspill.compile(self.model, **asked)
        self.door = door

    @staticmethod
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def step(self) -> None:
        if self.door == "train_step":
            self.source(self.x)
            return
        self.optimizer.zero_grad()
        self.source(self.x).square().mean().backward()
        self.optimizer.step()


@pytest.fixture(scope="module", params=["compile", "train_step"])
def recorded(request: pytest.FixtureRequest) -> tuple[Loop, Recording]:
    loop = Loop(request.param)
    for _ in range(3):
        loop.step()
    with overspill.record(loop.source, steps=STEPS) as recording:
        for _ in range(STEPS):
            loop.step()
    return loop, recording


def test_the_trace_of_a_run_on_the_gpu_is_in_order(recorded: tuple[Loop, Recording], tmp_path: Path) -> None:
    _, recording = recorded
    record = recording.record
    recording.trace(tmp_path / "run.json")
    measured = of_process(read_trace(tmp_path / "run.json"), MEASURED)
    assert max(counted(measured, LIVE)) == recording.peak_bytes
    assert sum(e.get("cat") == "issue" for e in measured) == len(record.host)
    (plan,) = recording.plans
    for verb, copies in record.copies.items():
        assert len(copies) == STEPS * plan.schedule.counts[verb] > 0
        assert all(copy.seconds > 0 for copy in copies)
    # No copy begins before what makes its tensor has ended, and none is read before it has come.
    ends = {(at, t.label.target): t.end_seconds for at in range(STEPS) for t in record.within(record.compute, at)
            if t.label is not None and t.label.verb is Verb.RUN}  # fmt: skip
    for at in range(STEPS):
        for copy in record.within(record.copies[Verb.OFFLOAD], at):
            assert copy.label is not None
            maker = copy.label.graph.producer.get(copy.label.target)
            if maker is not None and (at, maker) in ends:
                assert copy.begin_seconds >= ends[at, maker] - 1e-5
    recording.report(tmp_path / "run.html")


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def beside(copies: list[tuple[float, float]], work: list[tuple[float, float]]) -> float:
    """The share of the time of copies in which there is work too."""
    length = lambda spans: sum(end - begin for begin, end in merged(spans))  # noqa: E731
    return (length(copies) + length(work) - length(copies + work)) / length(copies)


def test_copies_lie_beside_ops_as_the_profiler_has_them_beside_kernels(recorded: tuple[Loop, Recording]) -> None:
    loop, recording = recorded
    record = recording.record
    last = len(record.steps) - 1
    ops = [(t.begin_seconds, t.end_seconds) for t in record.within(record.compute, last) if t.is_op]
    copies = [(t.begin_seconds, t.end_seconds) for of in record.copies.values() for t in record.within(of, last)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        loop.step()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    spans = [
        (e.name.startswith("Memcpy") and "DtoD" not in e.name, (e.time_range.start, e.time_range.end)) for e in events
    ]
    of_copies, of_kernels = ([span for is_copy, span in spans if is_copy is wanted] for wanted in (True, False))
    assert beside(copies, ops) == pytest.approx(beside(of_copies, of_kernels), abs=0.1)
    length = lambda found: sum(end - begin for begin, end in merged(found))  # noqa: E731
    assert length(copies) == pytest.approx(length(of_copies) / 1e6, rel=0.15)


def test_the_snapshot_is_pytorchs_own_and_says_what_each_allocation_is(
    recorded: tuple[Loop, Recording], tmp_path: Path
) -> None:
    _, recording = recorded
    recording.snapshot(tmp_path / "run.pickle")
    assert replay_snapshot(read_snapshot(tmp_path / "run.pickle")).equal
    snapshot = recording.record.device_snapshot
    assert snapshot is not None
    said = {entry["user_metadata"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"}
    (plan,) = recording.plans
    fetched = {"prefetch"} if plan.places is None else set()  # else it is in the arena
    assert {text.rpartition(" | ")[2] for text in said} >= {"run, forward", "run, backward"} | fetched
    steps = [a["name"] for a in snapshot["external_annotations"] if a["name"].startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, STEPS + 1) for _ in range(2)]


def test_a_recorded_step_takes_little_longer(recorded: tuple[Loop, Recording]) -> None:
    loop, _ = recorded

    def milliseconds() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        loop.step()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    plain = sorted(milliseconds() for _ in range(7))[3]
    with overspill.record(loop.source, steps=20, snapshot=False):
        loop.step()
        ours = sorted(milliseconds() for _ in range(7))[3]
    assert ours < 1.1 * plain
