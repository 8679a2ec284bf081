"""The trace of a plan: a file of the format, in which the timeline is found again."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from tests.report.tracing.format import Event, counted, named, nanoseconds, of_process, read_trace
from tests.simulate.graphs import DEVICE, Layer, network, with_lines

from overspill.core import Device, Stream, TensorKind, Verb
from overspill.core.errors import RequestError
from overspill.plans.plan import Plan, make_plan
from overspill.report.tracing.plan_trace import LIVE, PLANNED, UNMANAGED, write_plan_trace
from overspill.simulate.host import issues_of

STEP = network([Layer(3 * 2**20, workspace_bytes=100) for _ in range(8)])
CPU = replace(DEVICE, kind="cpu", transfer_host_seconds=0.25)
GPU = replace(DEVICE, kind="cuda", transfer_host_seconds=0.25, op_overhead_seconds=0.125)


@pytest.fixture(params=[CPU, GPU], ids=["processor", "behind-host"])
def plan(request: pytest.FixtureRequest) -> Plan:
    made = make_plan(STEP, request.param, "vdnn-all", 64 * 2**20)
    assert made.schedule.targets(Verb.OFFLOAD), "else there is nothing to see"
    return made


@pytest.fixture
def events(plan: Plan, tmp_path: Path) -> list[Event]:
    path = tmp_path / "trace.json"
    write_plan_trace(plan, path, "a step")
    return read_trace(path)


def test_it_says_that_it_is_simulated_and_has_the_streams(events: list[Event]) -> None:
    assert named(events, "process_name") == ["simulated: a step", "simulated, unmanaged: a network"]
    assert named(of_process(events, PLANNED), "thread_name") == ["layers", "compute", "offload", "prefetch", "host"]


def test_every_event_of_the_timeline_is_a_slice(plan: Plan, events: list[Event]) -> None:
    found = [(e["cat"], *nanoseconds(e)) for e in of_process(events, PLANNED) if e.get("cat") in set(Verb)]
    assert found == [(e.verb, round(e.start_seconds * 1e9), round(e.end_seconds * 1e9)) for e in plan.timeline.events]
    ops = [e for e in events if e.get("cat") == Verb.RUN]
    assert {e["args"]["layer"] for e in ops} == set(plan.graph.layers)
    assert all(e["args"]["phase"] in ("forward", "backward", "update") for e in ops)
    moved = [e["args"]["bytes"] for e in events if e.get("cat") == Verb.OFFLOAD]
    assert sum(moved) == plan.offloaded_bytes


def test_ops_and_the_tensors_that_move_have_their_line_and_its_stack(tmp_path: Path) -> None:
    made = make_plan(with_lines(STEP), CPU, "vdnn-all", 64 * 2**20)
    write_plan_trace(made, tmp_path / "trace.json")
    events = of_process(read_trace(tmp_path / "trace.json"), PLANNED)
    ran = [e["args"] for e in events if e.get("cat") == Verb.RUN]
    assert [args["source"] for args in ran] == [made.graph.source(t) for t in made.schedule.targets(Verb.RUN)]
    assert ran[0]["stack"] == ["train.py:7 main", "nets/model.py:100 forward"]
    assert any(args["source"].startswith("backward of ") for args in ran)
    (left, *_) = (e for e in events if e.get("cat") == Verb.OFFLOAD)
    tensor = next(t for t in made.graph.tensors if t.name == left["name"])
    assert left["args"]["source"] == made.graph.source(made.graph.producer[tensor.id])


def test_what_has_no_line_says_nothing_of_one(events: list[Event]) -> None:
    assert not [e for e in events if {"source", "stack"} & e.get("args", {}).keys()]


def test_the_counters_are_the_live_bytes_of_every_instruction(plan: Plan, events: list[Event]) -> None:
    for pid, timeline in ((PLANNED, plan.timeline), (UNMANAGED, plan.unmanaged_timeline)):
        values = counted(of_process(events, pid), LIVE)
        assert max(values) == timeline.peak_bytes
        remaining = iter(values)
        steps = [nbytes for nbytes, _ in groupby(timeline.live_bytes)]
        assert all(nbytes in remaining for nbytes in steps), "in their order, with what is left between them"


def test_the_kinds_add_up(events: list[Event]) -> None:
    now = dict.fromkeys([LIVE, *(f"{LIVE}: {kind}" for kind in TensorKind)], 0)
    compared = 0
    counters = [e for e in of_process(events, PLANNED) if e["ph"] == "C"]
    for event, following in zip(counters, [*counters[1:], {"name": LIVE}], strict=True):
        now[event["name"]] = event["args"]["bytes"]
        if following["name"] == LIVE:  # the total comes first of each moment
            assert now[LIVE] == sum(now.values()) - now[LIVE]
            compared += 1
    assert compared > len(STEP.ops)


def test_what_left_is_tied_to_what_comes_back(plan: Plan, events: list[Event]) -> None:
    assert sum(e["ph"] == "s" for e in events) == len(plan.schedule.targets(Verb.PREFETCH))


def test_stalls_say_what_they_wait_for(plan: Plan, events: list[Event]) -> None:
    stalls = [e for e in of_process(events, PLANNED) if e.get("cat") == "stall"]
    assert len(stalls) == len(plan.timeline.stalls) > 0
    assert sum(e["args"]["seconds"] for e in stalls) == pytest.approx(plan.timeline.exposed_transfer_seconds)
    assert all(e["name"] == f"waits: {e['args']['cause']}" for e in stalls)
    assert all("tensor" in e["args"] for e in stalls if "host" not in e["name"])


@pytest.mark.parametrize("device", [CPU, GPU], ids=["processor", "behind-host"])
def test_the_host_has_issued_what_runs(device: Device) -> None:
    made = make_plan(STEP, device, "vdnn-all", 64 * 2**20)
    issues = {issue.instruction: issue for issue in issues_of(made.schedule, device, made.timeline)}
    begins = {e.instruction: e for e in made.timeline.events if e.stream is not Stream.COMPUTE or device is GPU}
    assert issues.keys() == begins.keys()
    for index, issue in issues.items():
        of_op = begins[index].stream is Stream.COMPUTE  # whose launch is in its own time
        done = issue.start_seconds if of_op else issue.end_seconds
        assert done <= begins[index].start_seconds + 1e-12
    assert sum("host" in stall.cause for stall in made.timeline.stalls) > 0


def test_a_file_that_cannot_be_written_is_one_line(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        write_plan_trace(plan, tmp_path / "absent" / "trace.json")
