"""Measured op times: a profiled run stays exact, and what it measured is what the next plan uses."""

import pytest
import torch
from torch import nn

from overspill.core.errors import RequestError
from overspill.costs import MeasuredTimes, op_seconds, signature
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import load
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.profile import OpTimer
from overspill.runtime.training import train, train_plain

JOB = Job(lambda: load("resnet18", small=True), 2, "momentum")


@pytest.mark.long
def test_a_profiled_run_gives_the_same_numbers_and_a_time_for_every_op_that_runs(tmp_path) -> None:
    run = train(JOB, Options(budget="1GiB", store="host", profile=True))
    assert run.identical_to(train_plain(JOB, Options()))
    assert run.times is not None
    assert run.plan is not None
    graph = run.plan.graph
    captured = [op for op in graph.ops if not op.name.startswith("step.")]
    assert {signature(graph, op) for op in captured} == set(run.times.seconds)
    assert all(seconds > 0 for seconds in run.times.seconds.values())
    run.times.save(tmp_path / "times.json")
    assert MeasuredTimes.load(tmp_path / "times.json") == run.times


@pytest.mark.long
def test_a_plan_uses_measured_times_of_its_own_device_only() -> None:
    graph = preview(JOB, Options(budget="1GiB")).graph
    convolution = next(op for op in graph.ops if op.name == "convolution")
    measured = MeasuredTimes("cpu", {signature(graph, convolution): 3.0})
    assert op_seconds(graph, load_device("cpu"), measured)[convolution.id] == 3.0
    assert op_seconds(graph, load_device("h100"), measured)[convolution.id] < 1.0
    assert preview(JOB, Options(budget="1GiB", times=measured)).step_seconds > 3.0


def test_an_evaluation_between_steps_is_not_timed_as_if_its_ops_were_those_of_training() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    session = Session(Options(budget="1GiB", store="host", profile=True))
    model = compile_in(session, net)
    model(torch.randn(2, 4)).sum().backward()
    assert session.timer is not None
    before = {op: list(seconds) for op, seconds in session.timer._seconds.items()}
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert before
    assert session.timer._seconds == before
    session.close()


def test_profiling_is_for_the_eager_backend() -> None:
    with pytest.raises(RequestError, match="eager backend"):
        Options(profile=True, backend="inductor")


@pytest.mark.long
def test_on_cuda_events_time_ops_and_nothing_waits_before_the_times_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for events that read 2 ms later each time, and no device."""
    log: list[str] = []

    class Event:
        count = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            Event.count += 1
            self.at = 2.0 * Event.count
            log.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            log.append("waited")

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    graph = preview(JOB, Options(budget="1GiB")).graph
    op = next(op.id for op in graph.ops if op.name == "convolution")
    timer = OpTimer(graph, torch.device("cuda", 1))
    for _ in range(2):
        timer._start()
        timer._stop(op)
    assert log == ["recorded on the stream of cuda:1"] * 4
    assert timer.times("h100").seconds == {signature(graph, graph.ops[op]): pytest.approx(0.002)}
    assert log[4:] == ["waited"] * 2
