"""What a recorder makes of what it is told: steps, times on one axis, memory by what made it, and where it stops."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.recording.fake_device import DEVICE, FakeDevice
from tests.simulate.graphs import Layer, network

from overspill.core import Graph, TensorKind, Verb
from overspill.runtime.recording import recorder as recorder_file
from overspill.runtime.recording.record import Label, RunRecord
from overspill.runtime.recording.recorder import Copying, RunRecorder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return network([Layer(65536, flops=10**6) for _ in range(3)])


def one_step(recorder: RunRecorder, graph: Graph, ops: int = 2) -> None:
    recorder.begin_step(CPU)
    for op in range(ops):
        recorder.begin(Label(graph, Verb.RUN, op))
        recorder.end(torch.zeros(4))


# -- steps


def test_a_step_ends_with_the_last_optimizer_before_the_next_one_begins(graph: Graph) -> None:
    recorder = RunRecorder()
    for _ in range(2):
        one_step(recorder, graph)
        recorder.optimizer_stepped()
        ended = recorder.now()
        recorder.optimizer_stepped()
    recorder.finish()
    record = recorder.record
    assert len(record.steps) == 2
    assert record.steps[1].end_seconds >= ended
    assert record.steps[0].end_seconds <= record.steps[1].begin_seconds
    assert [len(record.within(record.compute, step)) for step in range(2)] == [2, 2]


def test_a_step_that_nothing_has_ended_is_recorded_in_part(graph: Graph) -> None:
    recorder = RunRecorder()
    one_step(recorder, graph)
    recorder.end_step()
    one_step(recorder, graph)
    recorder.finish()
    assert [facts.is_whole for facts in recorder.record.facts] == [True, False]


def test_after_the_last_step_that_was_asked_for_it_is_over_and_hears_nothing(graph: Graph) -> None:
    recorder, over = RunRecorder(2), []
    recorder.on_over = lambda: over.append(True)
    for _ in range(5):
        one_step(recorder, graph)
        recorder.end_step()
    assert over == [True]
    assert recorder.is_over
    recorder.copied(Verb.OFFLOAD, None, 0.0, 1.0)
    recorder.there([torch.zeros(9)], TensorKind.GRADIENT)
    recorder.given(graph, [0], [torch.zeros(9)])
    recorder.finish()
    record = recorder.record
    assert (len(record.steps), len(record.compute), record.copies[Verb.OFFLOAD]) == (2, 4, [])
    assert not record.is_full


def test_steps_by_hand_are_those_alone(graph: Graph) -> None:
    recorder = RunRecorder(by_hand=True)
    recorder.start(CPU)
    with recorder.step():
        one_step(recorder, graph)
        recorder.optimizer_stepped()
        recorder.end_step()
    one_step(recorder, graph)
    with pytest.raises(ValueError, match="stop"), recorder.step():
        raise ValueError("stop")
    recorder.finish()
    assert [facts.is_whole for facts in recorder.record.facts] == [True, False]


def test_what_has_failed_is_not_recorded_and_names_nothing(graph: Graph) -> None:
    recorder = RunRecorder()
    recorder.begin_step(CPU)
    recorder.begin(Label(graph, Verb.RUN, 0))
    recorder.forget()
    recorder.end()
    held = torch.zeros(8)
    recorder.there([held], None)
    recorder.finish()
    assert recorder.record.compute == []
    assert [change.label for change in recorder.record.changes] == [None]


def test_a_record_that_is_full_stops_in_the_middle_of_a_step(graph: Graph) -> None:
    recorder = RunRecorder(most_entries=8)  # of six a step
    for _ in range(3):
        one_step(recorder, graph)
        recorder.end_step()
    recorder.finish()
    record = recorder.record
    assert record.is_full
    assert len(record.compute) + len(record.changes) == 9
    assert [facts.is_whole for facts in record.facts] == [True, False]


def test_a_full_record_takes_what_is_said_of_it(graph: Graph) -> None:
    """`MOST_ENTRIES` says how large a full record is."""
    count = 5000
    recorder = RunRecorder(most_entries=count)
    recorder.begin_step(CPU)
    label = Label(graph, Verb.RUN, 0)
    tracemalloc.start()
    while not recorder.is_over:
        recorder.begin(label)
        recorder.end(torch.zeros(4))  # which comes and goes: three entries
    recorder.finish()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes / count * recorder_file.MOST_ENTRIES < 150e6


# -- memory


def test_a_storage_has_the_label_of_what_made_it_or_the_name_by_which_a_graph_is_given_it(graph: Graph) -> None:
    recorder = RunRecorder()
    recorder.start(CPU)
    known, unplanned = torch.zeros(16384), torch.zeros(10)
    recorder.there([known, unplanned], None)
    recorder.there([unplanned], TensorKind.GRADIENT)
    recorder.begin_step(CPU)
    new, part = torch.zeros(1), torch.zeros(7)
    recorder.given(graph, [1, None, 4, 2], [known, torch.zeros(1), new, part])
    recorder.given(graph, [1, None, 4, 2], [known, torch.zeros(1), new, part])  # for backward, say
    recorder.begin(Label(graph, Verb.PREFETCH, 0))
    made = torch.zeros(50)
    recorder.end(made)
    recorder.begin(Label(graph, Verb.OFFLOAD, 0))
    recorder.end(torch.zeros(1))  # a handle, which is not on the device
    empty = torch.zeros(0)
    recorder.begin(Label(graph, Verb.RUN, 0))
    recorder.end((empty, made))
    del known
    recorder.end_step()
    recorder.finish()
    changes = recorder.record.changes
    named = [(c.nbytes, c.label and (c.label.verb, c.label.target), c.kind) for c in changes]
    assert named == [
        (65536, (None, 1), None),
        (40, None, TensorKind.GRADIENT),
        (4, (None, 4), None),
        (28, None, TensorKind.ACTIVATION),  # less than the tensor that it is part of
        (200, (Verb.PREFETCH, 0), None),
        (-65536, None, None),
    ]
    assert [live for _, live in recorder.record.live_bytes()] == [65536, 65576, 65580, 65608, 65808, 272]
    assert recorder.record.peak_bytes() == recorder.record.peak_bytes(0) == 65808


def test_what_counts_storages_anyhow_goes_on_counting_them() -> None:
    from overspill.runtime.tracker import LiveBytes

    tracker, before = LiveBytes(CPU), torch.zeros(25)
    tracker.add([before])
    recorder = RunRecorder(by_hand=True)
    recorder.start(CPU, tracker)
    with recorder.step(), tracker:
        _ = before + 1
    recorder.finish()
    assert tracker.watch is None
    assert recorder.record.peak_bytes() == 200
    assert 200 <= tracker.peak_bytes < 300  # with what the op takes for its number


def test_forms_are_made_once_and_held_no_longer_than_the_recording() -> None:
    class Form:
        pass

    recorder, plain, made = RunRecorder(), object(), []
    recorder.start(CPU)

    def make() -> Form:
        made.append(form := Form())
        return form

    assert recorder.form_of(plain, make) is recorder.form_of(plain, make)
    alive = weakref.ref(made.pop())
    recorder.finish()
    gc.collect()
    assert alive() is None


# -- on a device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    found = FakeDevice(monkeypatch)
    monkeypatch.setattr(recorder_file.time, "perf_counter", lambda: found.now)
    return found


def on_device(
    graph: Graph, device: FakeDevice, steps: int = 1, seconds: float = 1e-3, issue: float = 1e-4
) -> RunRecord:
    """Steps of three ops of so many seconds, each of which takes the host less; the second waits for a copy that is started with the first."""
    recorder, before = RunRecorder(), device.waits
    recorder.start(DEVICE)

    def issued(label: Label, work: Callable[[], None]) -> None:
        recorder.begin(label)
        work()
        device.now += issue
        recorder.end()

    for _ in range(steps):
        recorder.begin_step(DEVICE)
        for op in range(3):
            issued(Label(graph, Verb.RUN, op), lambda: device.compute.work(seconds))
            recorder.changed(1000 + op, 64)
            if op == 0:
                copying = Copying(recorder, Verb.PREFETCH, Label(graph, Verb.PREFETCH, 0))
                device.copies.wait_stream(device.compute)
                copying.begin(device.copies)
                device.copies.work(2 * seconds)
                copying.end(device.copies)
                issued(Label(graph, Verb.AWAIT_PREFETCH, 0), lambda: device.compute.wait_stream(device.copies))
        recorder.end_step()
    assert device.waits == before + 1, "the host waits when the recording begins, and in no step"
    recorder.finish()
    assert device.waits == before + 2
    return recorder.record


def test_ops_copies_waits_and_the_host_are_on_one_axis(graph: Graph, device: FakeDevice) -> None:
    record = on_device(graph, device)
    assert record.on_device
    first, wait, second, third = record.compute
    (copy,) = record.copies[Verb.PREFETCH]
    assert first.seconds == pytest.approx(1e-3)
    assert copy.begin_seconds == pytest.approx(first.end_seconds)
    assert copy.seconds == pytest.approx(2e-3)
    assert wait.is_wait
    assert wait.begin_seconds == pytest.approx(first.end_seconds)
    assert wait.end_seconds == pytest.approx(copy.end_seconds)
    assert second.begin_seconds == pytest.approx(copy.end_seconds)
    assert [host.seconds for host in record.host] == [pytest.approx(1e-4)] * 4
    assert record.host[0].begin_seconds == pytest.approx(0)
    assert record.host[-1].end_seconds < second.begin_seconds, "the host runs ahead"
    (step,) = record.steps
    assert step.end_seconds == pytest.approx(third.end_seconds)


def test_memory_comes_and_goes_with_the_ops_of_compute(graph: Graph, device: FakeDevice) -> None:
    record = on_device(graph, device)
    ops = [thing for thing in record.compute if thing.is_op]
    assert [change.seconds for change in record.changes] == [pytest.approx(op.end_seconds) for op in ops]
    assert [live for _, live in record.live_bytes()] == [64, 128, 192]


def test_events_are_used_again_in_the_next_steps(graph: Graph, device: FakeDevice) -> None:
    on_device(graph, device)
    one, device.made = device.made, 0
    record = on_device(graph, device, steps=30, issue=5e-3)  # a host that is behind its device
    assert len(record.compute) == 120
    assert device.made <= one + 12


def test_times_stay_exact_in_a_recording_of_hours(graph: Graph, device: FakeDevice) -> None:
    record = on_device(graph, device, steps=40, seconds=50.0)
    ops = [thing for thing in record.compute if thing.is_op]
    assert ops[-1].begin_seconds == pytest.approx(39 * 250 + 200, abs=1e-2)
    assert all(op.seconds == pytest.approx(50, abs=1e-4) for op in ops)


def test_pytorchs_own_recorder_of_memory_is_on_as_long_as_the_recording(
    graph: Graph, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: said == ["the user's"], raising=False)
    monkeypatch.setattr(memory, "_get_memory_metadata", lambda: "theirs")
    monkeypatch.setattr(memory, "_set_memory_metadata", said.append)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled, **_: said.append(("history", enabled)))
    monkeypatch.setattr(memory, "_snapshot", lambda: {"external_annotations": [{"name": "a", "time_us": 1}]})

    def recorded() -> RunRecord:
        recorder = RunRecorder(snapshot=True)
        recorder.start(DEVICE)
        recorder.begin_step(DEVICE)
        recorder.begin(Label(graph, Verb.RUN, 0))
        recorder.end()
        recorder.end_step()
        recorder.finish()
        return recorder.record

    snapshot = recorded().device_snapshot
    text = Label(graph, Verb.RUN, 0).text
    assert said == [("history", "all"), text, "", "theirs", ("history", None)]
    assert snapshot is not None
    annotations = [(a["name"], a.get("stage")) for a in snapshot["external_annotations"]]
    assert annotations == [("a", None), ("step 1", "START"), ("step 1", "END")]
    said[:] = ["the user's"]
    recorded()
    assert said == ["the user's", text, "", "theirs"], "who records already goes on"
