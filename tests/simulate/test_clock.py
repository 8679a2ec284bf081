"""The clocked machine: streams, stalls, half duplex and contention, on steps small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.graphs import DEVICE, Build, schedule

from overspill.core import Device, Graph, Phase, Stall, Stream, Verb
from overspill.simulate import simulate

RUN, AGAIN, FREE = Verb.RUN, Verb.RECOMPUTE, Verb.FREE
OUT, OUT_DONE, BACK, BACK_DONE = Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH
A, B, C = range(3)
SECONDS = (1.0, 1.0, 1.0, 1.0)


@pytest.fixture
def graph() -> Graph:
    """op0 makes a and b, op1 makes c, op2 and op3 read a and b; a and b take 2 bytes, c takes 10."""
    build = Build()
    build.tensor(2, name="a")
    build.tensor(2, name="b")
    build.tensor(10, name="c")
    build.op([], [A, B], again=True)
    build.op([], [C])
    build.op([A, C], [], Phase.BACKWARD)
    build.op([B, C], [], Phase.BACKWARD)
    return build.graph()


@pytest.fixture
def device() -> Device:
    """One byte a second out, two back, no latency."""
    return replace(DEVICE, offload_bytes_per_second=1.0, prefetch_bytes_per_second=2.0, transfer_latency_seconds=0.0)


def test_ops_follow_one_another_and_the_other_verbs_take_no_time(graph: Graph, device: Device) -> None:
    made = schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (RUN, 3), (FREE, B), (FREE, C))
    timeline = simulate(graph, made, device, SECONDS)
    assert [(e.start_seconds, e.end_seconds) for e in timeline.events] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert (timeline.step_seconds, timeline.stalls) == (4.0, ())


def test_live_bytes_are_the_most_during_each_instruction(graph: Graph, device: Device) -> None:
    made = schedule((RUN, 0), (RUN, 1), (FREE, A), (AGAIN, 0), (RUN, 2), (FREE, A), (RUN, 3), (FREE, B), (FREE, C))
    assert simulate(graph, made, device, SECONDS).live_bytes == (4, 14, 14, 16, 14, 14, 12, 12, 10)


def test_the_wait_for_an_offload_lasts_until_it_is_done_and_names_the_tensor(graph: Graph, device: Device) -> None:
    timeline = simulate(graph, schedule((RUN, 0), (OUT, A), (RUN, 1), (OUT_DONE, A)), device, SECONDS)
    assert timeline.stalls == (Stall(3, 2.0, 3.0, "offload of a"),)
    assert (timeline.step_seconds, timeline.exposed_transfer_seconds) == (3.0, 1.0)


def test_the_wait_for_a_prefetch_names_the_tensor(graph: Graph, device: Device) -> None:
    made = schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (FREE, A), (BACK, A), (BACK_DONE, A))
    stall = simulate(graph, made, device, SECONDS).stalls[-1]
    assert (stall.cause, stall.start_seconds, stall.end_seconds) == ("prefetch of a", 3.0, 4.0)


def test_a_transfer_hidden_by_compute_stalls_nothing(graph: Graph, device: Device) -> None:
    timeline = simulate(graph, schedule((RUN, 0), (OUT, A), (RUN, 1), (RUN, 2), (OUT_DONE, A)), device, SECONDS)
    assert (timeline.stalls, timeline.step_seconds, timeline.overlapped_seconds) == ((), 3.0, 2.0)


def test_transfers_of_one_direction_follow_one_another(graph: Graph, device: Device) -> None:
    timeline = simulate(graph, schedule((RUN, 0), (OUT, A), (OUT, B)), device, SECONDS)
    assert [(e.start_seconds, e.end_seconds) for e in timeline.events if e.stream is Stream.OFFLOAD] == [(1, 3), (3, 5)]


@pytest.mark.parametrize(("full_duplex", "starts_at"), [(True, 4.0), (False, 6.0)])
def test_both_directions_run_at_once_on_a_full_duplex_link_only(
    graph: Graph, device: Device, full_duplex: bool, starts_at: float
) -> None:
    made = schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (FREE, A), (RUN, 1), (OUT, B), (BACK, A), (BACK_DONE, A))
    timeline = simulate(graph, made, replace(device, full_duplex=full_duplex), SECONDS)
    (prefetch,) = (e for e in timeline.events if e.stream is Stream.PREFETCH)
    assert prefetch.start_seconds == starts_at


def test_latency_is_paid_by_each_transfer(graph: Graph, device: Device) -> None:
    late = replace(device, transfer_latency_seconds=0.5)
    timeline = simulate(graph, schedule((RUN, 0), (OUT, A), (OUT, B), (OUT_DONE, B)), late, SECONDS)
    assert timeline.step_seconds == 1.0 + 2 * 2.5


def test_an_op_beside_a_transfer_takes_longer_by_the_share(graph: Graph, device: Device) -> None:
    shared = replace(device, transfer_compute_share=0.5)
    timeline = simulate(graph, schedule((RUN, 0), (OUT, A), (RUN, 1), (RUN, 2)), shared, SECONDS)
    assert timeline.events[2].end_seconds == pytest.approx(2.5)
    # Half a second of the transfer is left.
    assert timeline.step_seconds == pytest.approx(2.5 + 1.0 + 0.25)


def test_a_transfer_that_waits_for_the_link_does_not_slow_compute(graph: Graph, device: Device) -> None:
    shared = replace(device, transfer_compute_share=0.5, full_duplex=False)
    made = schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (FREE, A), (OUT, B), (BACK, A), (RUN, 1))
    # From 3 s on the offload of b has the link for 2 s, so that op1 runs beside one transfer, not two.
    timeline = simulate(graph, made, shared, SECONDS)
    assert timeline.events[-1].end_seconds - timeline.events[-1].start_seconds == pytest.approx(1.5)


def test_ops_of_no_time_and_tensors_of_no_bytes_are_nothing_special(device: Device) -> None:
    build = Build()
    a = build.tensor(0)
    build.op([], [a])
    build.op([a], [], Phase.BACKWARD)
    made = schedule((RUN, 0), (OUT, a), (OUT_DONE, a), (FREE, a), (BACK, a), (BACK_DONE, a), (RUN, 1), (FREE, a))
    timeline = simulate(build.graph(), made, device, (0.0, 0.0))
    assert (timeline.step_seconds, timeline.stalls, timeline.peak_bytes) == (0.0, (), 0)


def test_an_empty_schedule_takes_no_time(device: Device) -> None:
    assert simulate(Build().graph(), schedule(), device, ()).step_seconds == 0.0


TWO_TRANSFERS = schedule((RUN, 0), (OUT, A), (OUT, B), (RUN, 1))
HOST = "the host, which issues ops and transfers"


def test_a_cpu_carries_out_an_op_only_after_it_has_started_the_transfers_before_it(
    graph: Graph, device: Device
) -> None:
    timeline = simulate(graph, TWO_TRANSFERS, replace(device, transfer_host_seconds=0.25), SECONDS)
    assert [e.start_seconds for e in timeline.events] == [0.0, 1.25, 3.25, 1.5]
    assert timeline.step_seconds == 2.5
    assert timeline.stalls == (Stall(1, 1.0, 1.25, HOST), Stall(2, 1.25, 1.5, HOST))


def test_a_gpu_does_not_wait_for_a_host_that_is_ahead(graph: Graph, device: Device) -> None:
    gpu = replace(device, kind="cuda", op_overhead_seconds=0.25, transfer_host_seconds=0.25)
    timeline = simulate(graph, TWO_TRANSFERS, gpu, SECONDS)
    assert (timeline.step_seconds, timeline.stalls) == (2.0, ())


def test_a_gpu_waits_for_a_host_that_is_behind(graph: Graph, device: Device) -> None:
    gpu = replace(device, kind="cuda", op_overhead_seconds=1.0, transfer_host_seconds=0.25)
    timeline = simulate(graph, TWO_TRANSFERS, gpu, SECONDS)
    assert timeline.stalls == (Stall(3, 1.0, 1.5, HOST),)
    assert timeline.step_seconds == 2.5


def test_a_step_takes_no_less_than_its_host(graph: Graph, device: Device) -> None:
    gpu = replace(device, kind="cuda", op_overhead_seconds=3.0)
    assert simulate(graph, schedule((RUN, 0), (RUN, 1)), gpu, SECONDS).step_seconds == 6.0


def test_ops_alone_never_wait_for_a_host_whose_time_is_part_of_theirs(graph: Graph, device: Device) -> None:
    gpu = replace(device, kind="cuda", op_overhead_seconds=0.1)
    made = schedule(*((RUN, 0), (RUN, 1)) * 50)
    assert simulate(graph, made, gpu, (0.1, 0.1, 0.1, 0.1)).stalls == ()
