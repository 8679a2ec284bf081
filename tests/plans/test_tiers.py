"""Copies that go on to a disk: they fit host memory, each Prefetch finds its own, and the checker notices if not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.policies.plans import floor_bytes
from tests.policies.test_whole_step import LAYERS, whole
from tests.simulate.graphs import DEVICE, network, networks

from overspill.core import DiskStay, Graph, Schedule, Tiers
from overspill.core.errors import InvalidScheduleError
from overspill.costs import op_seconds
from overspill.plans.plan import tiers_of
from overspill.policies import policy_named
from overspill.simulate import simulate
from overspill.simulate.check_tiers import check_tiers

DISK = replace(DEVICE, disk_read_bytes_per_second=1e6, disk_write_bytes_per_second=5e5)


def planned(graph: Graph) -> Schedule:
    """All state that can be is in the store between steps."""
    policy = policy_named("auto")
    return policy.plan(graph, DEVICE, floor_bytes(policy, graph, DEVICE))


def tiers_for(graph: Graph, schedule: Schedule, host_bytes: int) -> Tiers:
    device = replace(DISK, host_bytes=host_bytes)
    tiers, timeline = tiers_of(graph, schedule, device, op_seconds(graph, device))
    assert tiers is not None
    assert timeline.step_seconds >= simulate(graph, schedule, DEVICE, op_seconds(graph, device)).step_seconds
    return tiers


def moved_bytes(graph: Graph, tiers: Tiers) -> int:
    pages = [-(-tensor.nbytes // 4096) * 4096 for tensor in graph.tensors]
    return sum(pages[stay.tensor] * (1 + stay.is_written) for stay in tiers.stays)


@given(graph=networks(), share=st.floats(0.0, 1.0))
@settings(max_examples=15, deadline=None)
def test_copies_fit_any_host_memory_that_those_in_use_fit(graph: Graph, share: float) -> None:
    step = whole(graph)
    schedule = planned(step)
    all_of_it = tiers_for(step, schedule, 1 << 50)
    assert not all_of_it.stays
    assume(all_of_it.host_peak_bytes)
    least = tiers_for(step, schedule, 1).host_peak_bytes
    host_bytes = int(least + share * (all_of_it.host_peak_bytes - least))
    tiers = tiers_for(step, schedule, host_bytes)  # which is checked
    assert tiers.host_peak_bytes <= host_bytes
    assert moved_bytes(step, tiers) >= tiers.least_moved_bytes
    assert bool(tiers.stays) == (host_bytes < all_of_it.host_peak_bytes)


def half_on_disk() -> tuple[Graph, Schedule, Tiers]:
    step = whole(network(LAYERS))
    schedule = planned(step)
    return step, schedule, tiers_for(step, schedule, tiers_for(step, schedule, 1 << 50).host_peak_bytes // 2)


def test_about_as_much_is_moved_as_must_be() -> None:
    step, _, tiers = half_on_disk()
    assert moved_bytes(step, tiers) <= 1.2 * tiers.least_moved_bytes


def _changed(tiers: Tiers, **how: int | bool) -> Tiers:
    first, *others = tiers.stays
    return replace(tiers, stays=(replace(first, **how), *others))  # type: ignore[arg-type]


def test_the_checker_notices_what_is_wrong() -> None:
    step, schedule, tiers = half_on_disk()
    first = tiers.stays[0]
    assert first.is_written
    assert check_tiers(step, schedule, tiers) == tiers.host_peak_bytes
    wrong = {
        "over its budget": replace(tiers, host_budget_bytes=tiers.host_peak_bytes - 1),
        "in host memory": _changed(tiers, read=first.needed + 1),
        "does not have": _changed(tiers, is_written=False),
        "host memory, over": _changed(tiers, read=first.write),
        "when it is read": _changed(tiers, write=(first.needed + 1) % len(schedule.instructions)),
    }
    for message, broken in wrong.items():
        with pytest.raises(InvalidScheduleError) as refused:
            check_tiers(step, schedule, broken)
        assert message in str(refused.value)
    twice = DiskStay(first.tensor, first.write, first.read, first.needed, is_written=True)
    with pytest.raises(InvalidScheduleError, match="not host"):
        check_tiers(step, schedule, replace(tiers, stays=(*tiers.stays, twice)))


def test_a_slower_disk_is_never_faster() -> None:
    step, schedule, tiers = half_on_disk()
    seconds, before = op_seconds(step, DISK), 0.0
    for rate in (1e12, 1e8, 1e7, 1e6, 1e5):
        device = replace(DISK, disk_read_bytes_per_second=rate, disk_write_bytes_per_second=rate)
        made = simulate(step, schedule, device, seconds, tiers)
        assert made.step_seconds >= before
        assert made.disk_seconds <= 1.01 * made.step_seconds
        before = made.step_seconds
    assert simulate(step, schedule, DISK, seconds).step_seconds == pytest.approx(
        simulate(step, schedule, replace(DISK, disk_read_bytes_per_second=1e15, disk_write_bytes_per_second=1e15,
                                         transfer_latency_seconds=0), seconds, tiers).step_seconds, rel=0.05
    )  # fmt: skip
