"""Updates on the host: what the reference machine allows and refuses, and the clock of steps in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.graphs import DEVICE, Build, schedule

from overspill.core import Device, Event, Graph, Phase, Schedule, Stall, Stream, TensorKind, Verb
from overspill.core.errors import InvalidScheduleError, RequestError
from overspill.simulate import check, simulate, trace_of

RUN, ON_HOST, FREE = Verb.RUN, Verb.RUN_ON_HOST, Verb.FREE
OUT, OUT_DONE, BACK, BACK_DONE = Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH
W, M, Y, G = range(4)
FORWARD = ((BACK, W), (BACK_DONE, W), (RUN, 0), (FREE, W))
BACKWARD = ((RUN, 1), (FREE, Y), (OUT, G), (OUT_DONE, G), (FREE, G))
UPDATE = ((ON_HOST, 2),)
SECONDS = (1.0, 1.0, 1.0)


@pytest.fixture
def graph() -> Graph:
    """op0 makes y of the weight w; op1 makes its gradient g; op2 updates w and its momentum m: 8 bytes each."""
    build = Build()
    build.tensor(8, TensorKind.PARAMETER, "w", persistent=True)
    build.tensor(8, TensorKind.OPTIMIZER_STATE, "m", persistent=True)
    build.tensor(8, name="y")
    build.tensor(8, TensorKind.GRADIENT, "g")
    build.op([W], [Y])
    build.op([Y], [G], Phase.BACKWARD)
    build.op([W, M, G], [W, M], Phase.UPDATE)
    made = build.graph()
    return replace(made, whole_step=True, tensors=tuple(replace(t, movable=True) for t in made.tensors))


@pytest.fixture
def device() -> Device:
    """A GPU with one byte a second out, two back, ten on the host, so that the update takes it four seconds."""
    return replace(
        DEVICE,
        kind="cuda",
        offload_bytes_per_second=1.0,
        prefetch_bytes_per_second=2.0,
        host_update_bytes_per_second=10.0,
        host_update_call_seconds=0.0,
        transfer_latency_seconds=0.0,
        op_overhead_seconds=0.0,
    )


def step(*instructions: tuple[Verb, int]) -> Schedule:
    """A step whose weight and momentum are in the store between steps."""
    return replace(schedule(*instructions), stored=(W, M))


def test_an_update_on_the_host_takes_no_memory_of_the_device(graph: Graph) -> None:
    made = step(*FORWARD, *BACKWARD, *UPDATE)
    assert check(graph, made).peak_bytes == 16
    assert trace_of(graph, made).lower_bound_bytes == 16


def test_without_any_of_its_instructions_the_step_is_refused(graph: Graph) -> None:
    whole = (*FORWARD, *BACKWARD, *UPDATE)
    for left_out in range(len(whole)):
        with pytest.raises(InvalidScheduleError):
            check(graph, step(*whole[:left_out], *whole[left_out + 1 :]))


def test_behind_the_update_the_store_has_the_new_weight(graph: Graph) -> None:
    leaves = ((OUT, W), (RUN, 0), (OUT_DONE, W), (FREE, W))
    check(graph, replace(schedule(*leaves, *BACKWARD, *UPDATE, (BACK, W), (BACK_DONE, W)), stored=(M,)))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (step(*FORWARD, *BACKWARD[:3], *UPDATE), "reads g"),  # which is still leaving
        (replace(step(*FORWARD, *BACKWARD, *UPDATE), stored=(W,)), "m.*present"),
        (step(*FORWARD, *BACKWARD, (BACK, M), *UPDATE), "m.*arriving"),
        (step(*FORWARD, *BACKWARD, (BACK, W), (BACK_DONE, W), *UPDATE), "w.*present"),
        (step(*FORWARD, *BACKWARD, *UPDATE, *UPDATE), "ran before"),
        (step((ON_HOST, 0)), "updates alone"),
        (step((ON_HOST, 3)), "no 3"),
    ],
)
def test_what_is_not_in_the_store_is_not_updated_there(graph: Graph, made: Schedule, reason: str) -> None:
    with pytest.raises(InvalidScheduleError, match=reason):
        check(graph, made)


def test_a_gradient_that_was_changed_behind_its_offload_is_refused() -> None:
    build = Build()
    w, g = build.tensor(8, TensorKind.PARAMETER, "w", persistent=True), build.tensor(8, TensorKind.GRADIENT, "g")
    build.op([], [g], Phase.BACKWARD)
    build.op([g], [g], Phase.BACKWARD)
    build.op([g], [w], Phase.UPDATE)
    graph = build.graph()
    graph = replace(graph, whole_step=True, tensors=tuple(replace(t, movable=True) for t in graph.tensors))
    early = schedule((RUN, 0), (OUT, g), (OUT_DONE, g), (RUN, 1), (FREE, g), (ON_HOST, 2))
    late = schedule((RUN, 0), (RUN, 1), (OUT, g), (OUT_DONE, g), (FREE, g), (ON_HOST, 2))
    check(graph, replace(late, stored=(w,)))
    with pytest.raises(InvalidScheduleError, match="old one"):
        check(graph, replace(early, stored=(w,)))


@pytest.mark.parametrize("seconds", [4.0, 40.0])
def test_the_next_step_waits_for_an_update_that_it_needs(graph: Graph, device: Device, seconds: float) -> None:
    """A first step takes 14 seconds; the next has its weight once the host has updated it."""
    device = replace(device, host_update_bytes_per_second=40 / seconds)
    timeline = simulate(graph, step(*FORWARD, *BACKWARD, *UPDATE), device, SECONDS)
    assert timeline.step_seconds == 14 + seconds
    assert timeline.stalls[0] == Stall(1, 0.0, seconds, "host update of w")
    assert timeline.events[-1] == Event(9, ON_HOST, 2, Stream.HOST_UPDATE, 14 + seconds, 14 + 2 * seconds)
    assert timeline.streams == (Stream.COMPUTE, Stream.OFFLOAD, Stream.PREFETCH, Stream.HOST_UPDATE)


def test_an_update_that_the_next_step_needs_late_costs_nothing(device: Device) -> None:
    """Each step computes for 20 seconds before it needs the weight, whose update has then long been done."""
    build = Build()
    for name, kind in (("w", TensorKind.PARAMETER), ("m", TensorKind.OPTIMIZER_STATE), ("y", TensorKind.ACTIVATION)):
        build.tensor(8, kind, name, persistent=kind is not TensorKind.ACTIVATION)
    build.tensor(8, TensorKind.GRADIENT, "g")
    build.op([], [])
    build.op([W], [Y])
    build.op([Y], [G], Phase.BACKWARD)
    build.op([W, M, G], [W, M], Phase.UPDATE)
    made = build.graph()
    graph = replace(made, whole_step=True, tensors=tuple(replace(t, movable=True) for t in made.tensors))
    late = step(
        (RUN, 0), (BACK, W), (BACK_DONE, W), (RUN, 1), (FREE, W), (RUN, 2), (FREE, Y), (OUT, G), (OUT_DONE, G), (FREE, G),
        (ON_HOST, 3),
    )  # fmt: skip
    timeline = simulate(graph, late, device, (20.0, 1.0, 1.0, 1.0))
    assert (timeline.step_seconds, timeline.host_update_seconds) == (20 + 4 + 1 + 1 + 8, 4)


@pytest.mark.parametrize(("small", "second"), [(24, 3.0), (23, 4.4)])
def test_small_updates_that_follow_one_another_are_one_call(
    device: Device, monkeypatch: pytest.MonkeyPatch, small: int, second: float
) -> None:
    """A call takes two seconds, one more parameter in it 0.6; each moves 24 bytes in 2.4 seconds."""
    monkeypatch.setattr("overspill.core.graph.SMALL_UPDATE_BYTES", small)
    build = Build()
    weights = [build.tensor(8, TensorKind.PARAMETER, name, persistent=True) for name in "vw"]
    gradients = [build.tensor(8, TensorKind.GRADIENT, name) for name in "gh"]
    build.op([], gradients, Phase.BACKWARD)
    for weight, gradient in zip(weights, gradients, strict=True):
        build.op([weight, gradient], [weight], Phase.UPDATE)
    made = build.graph()
    graph = replace(made, whole_step=True, tensors=tuple(replace(t, movable=True) for t in made.tensors))
    leave = [(verb, g) for verb in (OUT, OUT_DONE, FREE) for g in gradients]
    planned = replace(schedule((RUN, 0), *leave, (ON_HOST, 1), (ON_HOST, 2)), stored=tuple(weights))
    check(graph, planned)
    timeline = simulate(graph, planned, replace(device, host_update_call_seconds=2.0), SECONDS)
    took = [e.end_seconds - e.start_seconds for e in timeline.events if e.stream is Stream.HOST_UPDATE]
    assert took == pytest.approx([4.4, second])


def test_without_the_rate_of_the_host_no_update_there_is_simulated(graph: Graph, device: Device) -> None:
    with pytest.raises(RequestError, match="host_update_bytes_per_second"):
        simulate(graph, step(*FORWARD, *BACKWARD, *UPDATE), replace(device, host_update_bytes_per_second=0.0), SECONDS)
