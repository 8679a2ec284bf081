"""Every policy on one step: who fits, in which order, and what is said of those that cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Device, Graph, LayerType, Schedule, Verb
from overspill.core.errors import InfeasibleBudgetError, PolicyError, RequestError
from overspill.plans.comparison import BASELINE, Comparison, compare, in_order
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.policies import POLICIES, Policy

LIMITLESS = 1 << 40


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Six convolutions of 64 KiB whose transfers take about as long as they do."""
    return network([Layer(65536, LayerType.CONV, flops=10**8, weight_bytes=4096) for _ in range(6)], 65536)


def test_every_policy_has_one_row_and_what_fits_comes_first_by_time(graph: Graph) -> None:
    rows = compare(graph, DEVICE, POLICIES, unmanaged_peak(graph, DEVICE))
    assert sorted(row.policy for row in rows) == sorted(POLICIES)
    fitting = [row for row in rows if row.fits]
    assert rows[: len(fitting)] == fitting
    times = [row.plan.step_seconds for row in fitting if row.plan is not None]
    assert times == sorted(times)
    assert len(times) == len(fitting) > 0


def test_a_plan_is_the_one_that_the_policy_makes_alone(graph: Graph) -> None:
    budget = int(0.8 * unmanaged_peak(graph, DEVICE))
    for row in compare(graph, DEVICE, ("auto", "vdnn-all"), budget):
        limit = budget if row.policy == "auto" else LIMITLESS
        assert row.plan is not None
        assert row.plan.schedule == make_plan(graph, DEVICE, row.policy, limit).schedule
        assert row.plan.budget_bytes == budget


def test_a_policy_with_one_schedule_has_its_figures_where_they_are_over_the_budget(graph: Graph) -> None:
    budget = int(0.8 * unmanaged_peak(graph, DEVICE))
    rows = {row.policy: row for row in compare(graph, DEVICE, ("auto", "liveness", "in-core"), budget)}
    auto, liveness = rows["auto"], rows["liveness"]
    assert auto.fits
    assert auto.plan is not None
    assert auto.plan.peak_bytes <= budget
    assert not liveness.fits
    assert liveness.error is None
    assert liveness.plan is not None
    assert liveness.least_bytes == liveness.plan.peak_bytes == unmanaged_peak(graph, DEVICE)


def test_a_policy_that_cannot_meet_the_budget_names_a_floor_that_works(graph: Graph) -> None:
    (row,) = compare(graph, DEVICE, ("auto",), 1024)
    assert (row.plan, row.fits, row.slowdown, row.stall_cause) == (None, False, None, None)
    assert row.error is not None
    assert "minimum of policy auto" in row.error
    assert row.floor_bytes is not None
    (again,) = compare(graph, DEVICE, ("auto",), row.floor_bytes)
    assert again.fits


def test_what_does_not_fit_comes_by_the_memory_that_it_needs(graph: Graph) -> None:
    rows = compare(graph, DEVICE, ("in-core", "liveness", "auto"), 1024)
    assert [row.policy for row in rows] == ["auto", "liveness", "in-core"]
    assert in_order(rows[::-1]) == rows


def test_without_a_budget_the_device_is_the_budget_less_its_context(graph: Graph) -> None:
    device = replace(DEVICE, memory_bytes=1 << 20, context_bytes=1 << 18)
    (row,) = compare(graph, device, ("liveness",))
    assert row.plan is not None
    assert row.plan.budget_bytes == (1 << 20) - (1 << 18)


def test_stalls_are_told_apart_by_what_they_wait_for_and_add_up(graph: Graph) -> None:
    slow = replace(DEVICE, offload_bytes_per_second=1e5, prefetch_bytes_per_second=1e5)
    (row,) = compare(graph, slow, ("vdnn-all",), LIMITLESS)
    assert row.plan is not None
    assert row.stall_seconds.keys() == {"offload", "prefetch"}
    assert min(row.stall_seconds.values()) > 0
    assert sum(row.stall_seconds.values()) == pytest.approx(row.plan.timeline.exposed_transfer_seconds)
    assert row.stall_cause is not None
    assert row.stall_cause.startswith(("offload of ", "prefetch of "))


def test_slowdown_is_to_the_baseline_which_has_all_the_memory(graph: Graph) -> None:
    (row,) = compare(graph, DEVICE, (BASELINE,), 1024)
    assert not row.fits
    assert row.slowdown == 1.0


def test_a_name_counts_once_and_every_one_is_announced(graph: Graph) -> None:
    told: list[str] = []
    rows = compare(graph, DEVICE, ("liveness", "vdnn-all:m", "liveness"), LIMITLESS, progress=told.append)
    assert told == ["liveness", "vdnn-all:m"]
    assert {row.policy for row in rows} == set(told)


class Careless(Policy):
    """What somebody else wrote, in a hurry."""

    name = "careless"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        return graph.nothing_of_this_name  # type: ignore[attr-defined, no-any-return]


class Lossy(Careless):
    """One that makes a schedule that reads what is gone."""

    name = "lossy"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        made = POLICIES["liveness"]().plan(graph, device)
        return replace(made, instructions=made.instructions[1:])


def test_a_policy_that_fails_has_a_row_that_says_so_and_the_others_have_theirs(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in (Careless, Lossy):
        monkeypatch.setitem(POLICIES._known, policy.name, policy)
    rows = {row.policy: row for row in compare(graph, DEVICE, ("careless", "lossy", "liveness"))}
    assert rows["liveness"].fits
    assert not rows["careless"].fits
    said = rows["careless"].error or ""
    assert said.startswith("policy careless raised AttributeError: 'Graph' object has no attribute")
    assert "test_comparison.py, line " in said
    assert rows["lossy"].plan is None
    assert rows["lossy"].error
    with pytest.raises(PolicyError, match=r"careless .*AttributeError"):
        make_plan(graph, DEVICE, "careless", LIMITLESS)


def test_an_unknown_name_is_refused_before_anything_is_planned(graph: Graph) -> None:
    told: list[str] = []
    with pytest.raises(RequestError, match=r"'lifeness'; .*'liveness'"):
        compare(graph, DEVICE, ("auto", "lifeness"), LIMITLESS, progress=told.append)
    assert told == []


def test_the_bound_has_a_curve_from_the_least_that_any_plan_takes_to_the_unmanaged_step(graph: Graph) -> None:
    whole = unmanaged_peak(graph, DEVICE)
    budget = int(0.8 * whole)
    compared = Comparison(tuple(compare(graph, DEVICE, ("auto", "vdnn-all", "in-core"), budget)), DEVICE, budget)
    bounds = compared.bounds(5)
    budgets, seconds = [nbytes for nbytes, _ in bounds], [least for _, least in bounds]
    assert budgets[0] == min(row.plan.peak_bytes for row in compared if row.plan is not None)
    assert budgets == sorted({*budgets})
    assert budgets[-1] == whole
    assert seconds == sorted(seconds, reverse=True)
    assert dict(bounds)[budget] == compared.lower_bound_seconds
    for row in compared:
        if row.plan is not None:
            assert row.plan.step_seconds >= min(s for nbytes, s in bounds if nbytes >= min(row.plan.peak_bytes, whole))
    assert Comparison((), DEVICE, budget).bounds() == ()


@pytest.mark.parametrize("policy", [name for name in sorted(POLICIES) if POLICIES[name].offloads and name != "auto"])
def test_a_policy_that_moves_tensors_is_refused_where_device_and_host_share_one_memory(
    graph: Graph, policy: str
) -> None:
    with pytest.raises(InfeasibleBudgetError, match="frees nothing"):
        make_plan(graph, replace(DEVICE, unified_memory=True), policy, LIMITLESS)


def test_auto_recomputes_alone_where_device_and_host_share_one_memory(graph: Graph) -> None:
    budget = int(0.95 * unmanaged_peak(graph, DEVICE))
    assert make_plan(graph, DEVICE, "auto", budget).schedule.counts[Verb.OFFLOAD] > 0
    shared = make_plan(graph, replace(DEVICE, unified_memory=True), "auto", budget)
    assert shared.peak_bytes <= budget
    assert shared.schedule.counts[Verb.OFFLOAD] == 0 < shared.schedule.counts[Verb.RECOMPUTE]
