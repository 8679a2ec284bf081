"""`auto` keeps every budget from the floor upwards, and says what the floor is when it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, Layer, devices, network, networks

from overspill.core import Device, Graph, Schedule, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.costs import MeasuredTimes, signature
from overspill.planning.effort import Effort
from overspill.planning.floor import floor_of
from overspill.planning.gaps import SMALLEST_MOVE_BYTES
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import unmanaged_peak
from overspill.policies.auto import Auto
from overspill.simulate import check

EXAMPLES = settings(max_examples=20, deadline=None)
shares = st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0])


def between(graph: Graph, share: float) -> int:
    """The budget at `share` of the way from the floor to the unmanaged peak."""
    floor = floor_of(StepProgram(graph)).nbytes
    return floor + int(share * (unmanaged_peak(graph, DEVICE) - floor))


def naive_floor(graph: Graph) -> int:
    """The most that any op needs at once: what it touches, its workspace, and what is alive and can not leave."""
    needs = [0]
    for op in graph.ops:
        there = op.workspace_bytes
        for tensor in graph.tensors:
            uses = [*graph.uses[tensor.id], *([len(graph.ops)] if tensor.id in graph.outputs else [])]
            alive = tensor.persistent or (uses and uses[0] <= op.id <= uses[-1])
            leaves = tensor.movable and tensor.nbytes >= SMALLEST_MOVE_BYTES and op.id not in uses
            there += tensor.nbytes if alive and not leaves else 0
        needs.append(there)
    return max(needs)


@given(networks())
@EXAMPLES
def test_the_floor_is_the_largest_need_of_one_op(graph: Graph) -> None:
    assert floor_of(StepProgram(graph)).nbytes == naive_floor(graph)


@given(networks(), devices(), shares)
@EXAMPLES
def test_the_peak_is_within_every_budget_from_the_floor_upwards(graph: Graph, device: Device, share: float) -> None:
    budget = between(graph, share)
    assert check(graph, Auto().plan(graph, device, budget)).peak_bytes <= budget


@given(networks(), devices(), st.sampled_from([1, 2, 1000]))
@EXAMPLES
def test_below_the_floor_the_error_names_it(graph: Graph, device: Device, short: int) -> None:
    floor = floor_of(StepProgram(graph)).nbytes
    if floor <= short:
        return
    with pytest.raises(InfeasibleBudgetError) as caught:
        Auto().plan(graph, device, floor - short)
    assert (caught.value.floor_bytes, caught.value.budget_bytes) == (floor, floor - short)
    assert caught.value.cause in str(caught.value)


@given(networks(), devices())
@EXAMPLES
def test_with_room_enough_or_no_budget_nothing_is_moved_or_remade(graph: Graph, device: Device) -> None:
    for budget in (unmanaged_peak(graph, device), None):
        assert set(Auto().plan(graph, device, budget).counts) <= {Verb.RUN, Verb.FREE}


def scaled(graph: Graph, factor: int) -> Graph:
    """The same step with all sizes `factor` times as large."""
    return replace(
        graph,
        tensors=tuple(replace(t, nbytes=t.nbytes * factor) for t in graph.tensors),
        ops=tuple(replace(op, workspace_bytes=op.workspace_bytes * factor) for op in graph.ops),
    )


@given(networks(), devices(), shares, st.sampled_from([2, 3, 64]))
@EXAMPLES
def test_what_is_feasible_stays_so_when_sizes_and_budget_grow_alike(
    graph: Graph, device: Device, share: float, factor: int
) -> None:
    budget = between(graph, share)
    large = scaled(graph, factor)
    assert check(large, Auto().plan(large, device, budget * factor)).peak_bytes <= budget * factor


@given(networks(), devices(), shares)
@EXAMPLES
def test_each_tensor_goes_to_the_store_at_most_once(graph: Graph, device: Device, share: float) -> None:
    sent = Auto().plan(graph, device, between(graph, share)).targets(Verb.OFFLOAD)
    assert len(sent) == len(set(sent))


def moved(made: Schedule) -> set[Verb]:
    return set(made.counts) - {Verb.RUN, Verb.FREE}


DEEP = network([Layer(50_000, flops=10**6) for _ in range(10)])


def test_where_the_link_is_slow_it_recomputes() -> None:
    slow = replace(DEVICE, offload_bytes_per_second=1e3, prefetch_bytes_per_second=1e3)
    assert moved(Auto().plan(DEEP, slow, between(DEEP, 0.6))) == {Verb.RECOMPUTE}


def test_where_ops_are_slow_it_offloads() -> None:
    weak = replace(
        DEVICE, flops_per_second={"float32": 1e4}, offload_bytes_per_second=1e9, prefetch_bytes_per_second=1e9
    )
    assert Verb.RECOMPUTE not in moved(Auto().plan(DEEP, weak, between(DEEP, 0.6)))


def test_measured_times_turn_the_choice() -> None:
    slow = replace(DEVICE, offload_bytes_per_second=1e5, prefetch_bytes_per_second=1e5)
    times = MeasuredTimes(slow.name, {signature(DEEP, op): 1e6 for op in DEEP.ops})
    assert Verb.RECOMPUTE in moved(Auto().plan(DEEP, slow, between(DEEP, 0.6)))
    assert Verb.RECOMPUTE not in moved(Auto().plan(DEEP, slow, between(DEEP, 0.6), times))


def test_what_is_random_is_never_recomputed() -> None:
    slow = replace(DEVICE, offload_bytes_per_second=1e3, prefetch_bytes_per_second=1e3)
    graph = network([Layer(50_000, flops=10**6, random=True) for _ in range(10)])
    assert Verb.RECOMPUTE not in moved(Auto().plan(graph, slow, between(graph, 0.5)))


@pytest.mark.parametrize("text", ["none", "0", "-1", "inf", "nan"])
def test_an_effort_that_is_no_factor_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_EFFORT", text)
    with pytest.raises(RequestError, match=f"OVERSPILL_EFFORT={text}"):
        Auto()


def test_the_usual_effort_is_scaled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_EFFORT", "0.5")
    assert Auto().effort == Effort().scaled(0.5) != Effort()
