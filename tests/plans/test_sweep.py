"""The budget sweep: its ends, its order, the bound, and what is said of policies that cannot go so low."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Device, Graph, LayerType
from overspill.core.budget import Budget
from overspill.core.device import ABSENT
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.placement.card import Card
from overspill.plans.fit import search
from overspill.plans.plan import Plan, make_plan, unmanaged_peak
from overspill.plans.sweep import Sweep, sweep

POINTS = 6


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Six convolutions of 64 KiB whose transfers take about as long as they do."""
    return network([Layer(65536, LayerType.CONV, flops=10**8, weight_bytes=4096) for _ in range(6)], 65536)


@pytest.fixture(scope="module")
def found(graph: Graph) -> Sweep:
    return sweep(graph, DEVICE, ("auto", "vdnn-all", "checkpoint-cost"), POINTS)


def of(found: Sweep, policy: str) -> list[tuple[int, float, float]]:
    """Budget, seconds and bound of the points of `policy` that have a plan."""
    points = [point for point in found.points if point.policy == policy]
    return [(p.budget_bytes, p.plan.step_seconds, p.lower_bound_seconds) for p in points if p.plan is not None]


def test_it_goes_from_the_unmanaged_peak_to_the_smallest_budget_that_works(graph: Graph, found: Sweep) -> None:
    budgets = [budget for budget, _, _ in of(found, "auto")]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == unmanaged_peak(graph, DEVICE) == found.unmanaged_peak_bytes
    assert 2 < len(budgets) <= POINTS
    floor = found.floors["auto"].nbytes
    assert 0 <= budgets[-1] - floor <= budgets[0] / 1000  # rounded up to a thousandth
    with pytest.raises(InfeasibleBudgetError):
        make_plan(graph, DEVICE, "auto", floor - 1)


def test_less_memory_is_never_faster_and_no_plan_beats_the_bound(found: Sweep) -> None:
    for policy in ("auto", "checkpoint-cost"):
        points = of(found, policy)
        seconds, bounds = [s for _, s, _ in points], [b for _, _, b in points]
        assert seconds == sorted(seconds)
        assert bounds == sorted(bounds)
        assert all(bound <= taken for taken, bound in zip(seconds, bounds, strict=True))
    assert of(found, "auto")[-1][1] > of(found, "auto")[0][1]  # a sweep without a bend would show nothing


def test_the_share_of_a_row_to_one_decimal_is_a_budget_that_gives_its_plan(graph: Graph, found: Sweep) -> None:
    for point in found.points:
        if point.plan is not None and point.policy != "vdnn-all":
            share = f"{100 * point.budget_bytes / found.unmanaged_peak_bytes:.1f}%"
            budget = Budget.parse(share).bytes_of(lambda: unmanaged_peak(graph, DEVICE), 0, lambda: 0)
            assert budget == point.budget_bytes == point.plan.budget_bytes >= point.plan.peak_bytes
            assert make_plan(graph, DEVICE, point.policy, budget).schedule == point.plan.schedule


@pytest.mark.long
def test_on_a_card_budgets_are_sizes_of_it_and_rows_are_what_such_a_card_gives(graph: Graph) -> None:
    gpu = replace(DEVICE, memory_bytes=1 << 40, context_bytes=1 << 20, index=ABSENT)
    card = Card(gpu, (4096,))
    large = replace(graph, tensors=tuple(replace(t, nbytes=256 * t.nbytes) for t in graph.tensors))
    found = sweep(large, gpu, ("auto", "vdnn-all"), POINTS, account=card)
    assert found.unmanaged_bytes == found.unmanaged_device_bytes == card.unmanaged(large)
    budgets = [budget for budget, _, _ in of(found, "auto")]
    assert budgets[0] == found.unmanaged_device_bytes > found.unmanaged_peak_bytes
    for point in found.points:
        assert point.plan is not None
        assert point.plan.needed_bytes == point.plan.device_bytes
        assert point.plan.device_bytes <= point.budget_bytes == point.plan.device_budget_bytes
        assert point.lower_bound_seconds <= point.plan.step_seconds
        if point.policy == "auto":
            again = search(large, card, "auto", point.budget_bytes).plan()
            assert again.schedule == point.plan.schedule
    floor = found.floors["auto"].nbytes
    with pytest.raises(InfeasibleBudgetError) as error:
        search(large, card, "auto", floor - 1).plan()
    assert error.value.floor_bytes == floor


def test_a_larger_budget_whose_plan_is_slower_is_left_out(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that is slow for 70 to 90 % of the memory."""
    top = unmanaged_peak(graph, DEVICE)

    def made(graph: Graph, device: Device, policy: str, budget: int, times: object = None) -> Plan:
        plan = make_plan(graph, device, policy, budget)
        longer = replace(plan.timeline, step_seconds=10 * plan.step_seconds)
        return replace(plan, timeline=longer) if 0.7 * top < budget < 0.9 * top else plan

    monkeypatch.setattr("overspill.plans.plan.make_plan", made)
    found = sweep(graph, DEVICE, ("auto",), 8)
    seconds = [s for _, s, _ in of(found, "auto")]
    assert seconds == sorted(seconds)
    assert not [b for b, _, _ in of(found, "auto") if 0.7 * top < b < 0.9 * top]


def test_no_plan_stands_in_two_rows(found: Sweep) -> None:
    made = [(p.policy, p.plan.needed_bytes, p.plan.step_seconds) for p in found.points if p.plan is not None]
    assert len(made) == len(set(made))


def test_a_policy_that_makes_one_schedule_has_one_point_at_its_peak(found: Sweep) -> None:
    ((budget, _, _),) = of(found, "vdnn-all")
    assert budget == found.floors["vdnn-all"].nbytes


def test_a_policy_that_cannot_go_so_low_says_why_and_has_its_own_smallest_budget(found: Sweep) -> None:
    floor = found.floors["checkpoint-cost"]
    assert floor.nbytes > found.floors["auto"].nbytes
    assert floor.nbytes <= of(found, "checkpoint-cost")[-1][0] <= floor.nbytes + found.unmanaged_peak_bytes / 1000
    errors = [point.error for point in found.points if point.policy == "checkpoint-cost" and point.plan is None]
    assert errors
    assert all(
        error is not None and "minimum of policy checkpoint-cost" in error and floor.cause in error for error in errors
    )


def test_no_point_of_the_frontier_is_beaten_and_every_other_is(found: Sweep) -> None:
    planned = [(p.budget_bytes, p.plan.step_seconds) for p in found.points if p.plan is not None]
    frontier = [(p.budget_bytes, p.plan.step_seconds) for p in found.frontier if p.plan is not None]
    assert frontier == sorted(frontier, reverse=True)
    assert {at for at in planned if not any(b <= at[0] and s <= at[1] and (b, s) != at for b, s in planned)} == {
        *frontier
    }


def test_a_curve_that_is_flat_needs_its_ends_alone(graph: Graph) -> None:
    told: list[str] = []
    flat = sweep(graph, DEVICE, ("liveness", "in-core"), POINTS, progress=told.append)
    assert [point.policy for point in flat.points] == ["liveness", "in-core"]
    assert [p.policy for p in flat.frontier] == ["liveness"]
    assert "planning the smallest of liveness" in told


def test_a_sweep_has_two_ends_and_known_policies(graph: Graph) -> None:
    with pytest.raises(RequestError, match="too few"):
        sweep(graph, DEVICE, points=1)
    with pytest.raises(RequestError, match=r"'lifeness'; .*'liveness'"):
        sweep(graph, DEVICE, ("lifeness",))
