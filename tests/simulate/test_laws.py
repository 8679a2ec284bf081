"""What holds for every schedule of every policy on every step: check, clock and trace agree, and time is sane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, devices, networks, recount

from overspill.core import Device, Graph, Schedule, Stream, Verb
from overspill.core.errors import InfeasibleBudgetError, InvalidScheduleError
from overspill.costs import op_seconds
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.policies import POLICIES
from overspill.simulate import check, simulate, trace_of

EXAMPLES = settings(max_examples=20, deadline=None)


@st.composite
def planned(draw: st.DrawFn, max_share: float = 0.5) -> tuple[Graph, Schedule, Device]:
    """A step, a device, and the schedule of some policy; under some budget that can be met if the policy wants one."""
    graph, device = draw(networks()), draw(devices(max_share))
    policy = POLICIES[draw(st.sampled_from([*POLICIES, "auto", "auto", "auto"]))]()
    budget = None
    if policy.plans_for_budget:
        floor, top = floor_of(StepProgram(graph)).nbytes, int(StepProgram(graph).live_bytes().max())
        budget = floor + int(draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9])) * (top - floor))
    try:
        return graph, policy.plan(graph, device, budget), device
    except InfeasibleBudgetError as error:  # a policy that does not use every way to save memory
        return graph, policy.plan(graph, device, error.floor_bytes), device


@given(planned())
@EXAMPLES
def test_check_finds_the_peak_of_a_naive_recount(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, _ = case
    result = check(graph, made)
    counted = recount(graph, made)
    assert result.peak_bytes == max(counted) == counted[result.peak_instruction]


@given(planned())
@EXAMPLES
def test_the_clock_counts_the_same_bytes_as_check(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, device = case
    timeline = simulate(graph, made, device, op_seconds(graph, device))
    assert list(timeline.live_bytes) == recount(graph, made)
    assert timeline.peak_bytes == check(graph, made).peak_bytes


@given(planned())
@EXAMPLES
def test_the_lower_bound_of_the_trace_is_the_peak(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, _ = case
    assert trace_of(graph, made).lower_bound_bytes == check(graph, made).peak_bytes


@given(planned())
@EXAMPLES
def test_a_step_takes_at_least_its_ops_and_no_more_than_all_in_a_row(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, device = case
    seconds = op_seconds(graph, device)
    timeline = simulate(graph, made, device, seconds)
    rematerialized = sum(seconds[op] for op in made.targets(Verb.RECOMPUTE))
    assert timeline.step_seconds >= (sum(seconds) + rematerialized) * (1 - 1e-9)
    assert timeline.step_seconds <= (timeline.compute_seconds + timeline.transfer_seconds) * (1 + 1e-9)
    assert timeline.step_seconds == pytest.approx(timeline.compute_seconds + timeline.exposed_transfer_seconds)


@given(planned())
@EXAMPLES
def test_no_stream_does_two_things_at_once(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, device = case
    timeline = simulate(graph, made, device, op_seconds(graph, device))
    copies = [[Stream.OFFLOAD], [Stream.PREFETCH]] if device.full_duplex else [[Stream.OFFLOAD, Stream.PREFETCH]]
    for streams in [[Stream.COMPUTE], *copies]:
        spans = [(e.start_seconds, e.end_seconds) for e in timeline.events if e.stream in streams]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


AWAITED = {Verb.AWAIT_OFFLOAD: "offload", Verb.AWAIT_PREFETCH: "prefetch"}


@given(planned())
@EXAMPLES
def test_every_stall_names_its_cause(case: tuple[Graph, Schedule, Device]) -> None:
    graph, made, device = case
    for stall in simulate(graph, made, device, op_seconds(graph, device)).stalls:
        instruction = made.instructions[stall.instruction]
        if (direction := AWAITED.get(instruction.verb)) is None:
            assert stall.cause == "the host, which issues ops and transfers"
        else:
            assert stall.cause == f"{direction} of {graph.tensors[instruction.target].name}"
        assert stall.end_seconds > stall.start_seconds


@given(planned(max_share=0.5), st.floats(1.0, 100.0), st.floats(1.0, 100.0))
@EXAMPLES
def test_more_bandwidth_never_makes_a_schedule_slower(
    case: tuple[Graph, Schedule, Device], out: float, back: float
) -> None:
    graph, made, device = case
    faster = replace(
        device,
        offload_bytes_per_second=device.offload_bytes_per_second * out,
        prefetch_bytes_per_second=device.prefetch_bytes_per_second * back,
    )
    seconds = op_seconds(graph, device)
    slow, fast = (simulate(graph, made, d, seconds).step_seconds for d in (device, faster))
    assert fast <= slow * (1 + 1e-9)


@given(planned(), st.floats(1.0, 10.0))
@EXAMPLES
def test_half_duplex_is_never_faster_than_full_duplex(case: tuple[Graph, Schedule, Device], longer: float) -> None:
    graph, made, device = case
    seconds = [s * longer for s in op_seconds(graph, device)]
    full, half = (simulate(graph, made, replace(device, full_duplex=d), seconds).step_seconds for d in (True, False))
    assert full <= half * (1 + 1e-9)


@given(planned())
@EXAMPLES
def test_without_transfers_and_recomputation_a_step_takes_the_sum_of_its_ops(
    case: tuple[Graph, Schedule, Device],
) -> None:
    graph, made, device = case
    assume(not made.counts[Verb.OFFLOAD] and not made.counts[Verb.RECOMPUTE])
    seconds = op_seconds(graph, device)
    assert simulate(graph, made, device, seconds).step_seconds == pytest.approx(sum(seconds))


def _drop(made: Schedule, index: int) -> Schedule:
    return replace(made, instructions=made.instructions[:index] + made.instructions[index + 1 :])


def _twice(made: Schedule, index: int) -> Schedule:
    return replace(made, instructions=made.instructions[: index + 1] + made.instructions[index:])


@pytest.mark.parametrize("spoil", [_drop, _twice])
@given(case=planned(), data=st.data())
@EXAMPLES
def test_a_schedule_with_an_instruction_missing_or_doubled_is_refused(
    spoil: Callable[[Schedule, int], Schedule], case: tuple[Graph, Schedule, Device], data: st.DataObject
) -> None:
    graph, made, _ = case
    # A recomputation may be repeated, or find what it makes still there.
    rematerialized = {t for op in made.targets(Verb.RECOMPUTE) for t in graph.ops[op].recompute_writes}
    indices = [
        index
        for index, instruction in enumerate(made.instructions)
        if instruction.verb is not Verb.RECOMPUTE
        and not (instruction.verb is Verb.FREE and instruction.target in rematerialized)
    ]
    with pytest.raises(InvalidScheduleError):
        check(graph, spoil(made, data.draw(st.sampled_from(indices))))


@given(networks())
@EXAMPLES
def test_a_policy_that_adapts_to_no_budget_says_so_by_its_peak_alone(graph: Graph) -> None:
    for policy in POLICIES.values():
        if not policy.plans_for_budget:
            assert policy().plan(graph, DEVICE).budget_bytes is None
