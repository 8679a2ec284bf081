"""Copies that go on to a disk: they fit host memory, each Prefetch finds its own, and the checker notices if not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.policies.plans import floor_bytes
from tests.policies.test_whole_step import LAYERS, whole
from tests.simulate.graphs import DEVICE, network, networks

from overspill.core import DiskStay, Graph, Schedule, Stream, Tiers, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.costs import op_seconds
from overspill.planning.on_host import begun_when_free, updates_of
from overspill.planning.tiers import StoredCopies
from overspill.plans.plan import make_plan, tiers_of
from overspill.policies import policy_named
from overspill.policies.auto import host_updates
from overspill.policies.auto.host_updates import UPDATES
from overspill.simulate import simulate
from overspill.simulate.check_tiers import check_tiers

HOSTED = replace(DEVICE, host_update_bytes_per_second=2e6)
DISK = replace(HOSTED, disk_read_bytes_per_second=1e6, disk_write_bytes_per_second=5e5)


def planned(graph: Graph, update: str = "device") -> Schedule:
    """All state that can be is in the store between steps."""
    policy = policy_named("auto:update=host") if update == "host" and updates_of(graph) else policy_named("auto")
    schedule = policy.plan(graph, HOSTED, floor_bytes(policy, graph, HOSTED))
    return begun_when_free(graph, schedule, simulate(graph, schedule, HOSTED, op_seconds(graph, HOSTED)))


def tiers_for(graph: Graph, schedule: Schedule, host_bytes: int) -> Tiers:
    device = replace(DISK, host_bytes=host_bytes)
    tiers, timeline = tiers_of(graph, schedule, device, op_seconds(graph, device))
    assert tiers is not None
    assert timeline.step_seconds >= simulate(graph, schedule, HOSTED, op_seconds(graph, device)).step_seconds * (
        1 - 1e-9
    )
    return tiers


def moved_bytes(graph: Graph, tiers: Tiers) -> int:
    pages = [-(-tensor.nbytes // 4096) * 4096 for tensor in graph.tensors]
    return sum(pages[stay.tensor] * (1 + stay.is_written) for stay in tiers.stays)


@given(graph=networks(), share=st.floats(0.0, 1.0), update=st.sampled_from(("device", "host")))
@settings(max_examples=20, deadline=None)
def test_copies_fit_any_host_memory_that_those_in_use_fit(graph: Graph, share: float, update: str) -> None:
    step = whole(graph)
    schedule = planned(step, update)
    all_of_it = tiers_for(step, schedule, 1 << 50)
    assert not all_of_it.stays
    assume(all_of_it.host_peak_bytes)
    least = tiers_for(step, schedule, 1).host_peak_bytes
    host_bytes = int(least + share * (all_of_it.host_peak_bytes - least))
    tiers = tiers_for(step, schedule, host_bytes)  # which is checked
    assert tiers.host_peak_bytes <= host_bytes
    assert moved_bytes(step, tiers) >= tiers.least_moved_bytes
    assert bool(tiers.stays) == (host_bytes < all_of_it.host_peak_bytes)


def half_on_disk(update: str = "device") -> tuple[Graph, Schedule, Tiers]:
    step = whole(network(LAYERS))
    schedule = planned(step, update)
    return step, schedule, tiers_for(step, schedule, tiers_for(step, schedule, 1 << 50).host_peak_bytes // 2)


@pytest.mark.parametrize("update", ["device", "host"])
def test_about_as_much_is_moved_as_must_be(update: str) -> None:
    step, _, tiers = half_on_disk(update)
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


def test_the_state_of_an_update_on_the_host_is_there_for_it() -> None:
    """It is read before the update, and written behind it: the checker refuses it otherwise."""
    step, schedule, tiers = half_on_disk("host")
    on_host = {at: step.ops[i.target] for at, i in enumerate(schedule.instructions) if i.verb is Verb.RUN_ON_HOST}
    state = [stay for stay in tiers.stays if stay.tensor in getattr(on_host.get(stay.needed), "writes", ())]
    assert state
    for stay in state:
        assert stay.is_written
        early = replace(stay, write=stay.needed, read=(stay.needed + 1) % len(schedule.instructions))
        others = tuple(other for other in tiers.stays if other is not stay)
        for broken in (replace(stay, is_written=False), early):
            with pytest.raises(InvalidScheduleError, match="the copy of"):
                check_tiers(step, schedule, replace(tiers, host_budget_bytes=1 << 40, stays=(*others, broken)))
    seconds = op_seconds(step, DISK)
    timeline = simulate(step, schedule, replace(DISK, host_bytes=tiers.host_budget_bytes), seconds, tiers)
    begun = {e.instruction: e.start_seconds for e in timeline.events if e.stream is Stream.HOST_UPDATE}
    for stay in (stay for stay in state if stay.read < stay.needed):
        reads = [e.end_seconds for e in timeline.events if e.stream is Stream.DISK and e.instruction == stay.read]
        assert min(reads) <= begun[stay.needed]


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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_written_just_in_time_is_written_ahead(kind: str) -> None:
    """A disk that has work for 0.6 of the step delays it little; without a lead the step took up to 1.27 times as long."""
    step = whole(network([LAYERS[0]] * 16))
    device, policy = replace(HOSTED, kind=kind), policy_named("auto")
    schedule = policy.plan(step, device, floor_bytes(policy, step, device) * 3 // 2)
    seconds = op_seconds(step, device)
    alone = simulate(step, schedule, device, seconds).step_seconds
    disk = replace(DISK, kind=kind, host_bytes=int(StoredCopies(step, schedule, device).held.max() * 0.8))
    rate = StoredCopies(step, schedule, disk).least_seconds / (0.6 * alone)
    read, write = disk.disk_read_bytes_per_second * rate, disk.disk_write_bytes_per_second * rate
    disk = replace(disk, disk_read_bytes_per_second=read, disk_write_bytes_per_second=write)
    timeline = tiers_of(step, schedule, disk, seconds)[1]
    assert 0.6 * alone <= timeline.disk_seconds <= 0.75 * alone
    assert timeline.step_seconds < 1.18 * alone


@pytest.mark.parametrize("disk", [1e9, 1e6, 2e5])
def test_auto_updates_where_it_is_faster_with_the_disk_too(disk: float) -> None:
    """Updates on the host spare the link, but they have all state in the store."""
    step = whole(network(LAYERS))
    device = replace(DISK, host_bytes=1 << 40, disk_read_bytes_per_second=disk, disk_write_bytes_per_second=disk)
    policy = policy_named("auto")
    budget = floor_bytes(policy, step, device) * 5 // 4
    whole_bytes = make_plan(step, device, policy, budget).tiers
    assert whole_bytes is not None
    device = replace(device, host_bytes=whole_bytes.host_peak_bytes * 2 // 3)
    plans = {way: make_plan(step, device, policy_named(f"auto:update={way}"), budget) for way in UPDATES}
    assert plans["auto"].step_seconds <= min(plans["device"].step_seconds, plans["host"].step_seconds) * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_updates_on_the_host_are_early_or_late_whichever_is_faster(share: float) -> None:
    """Early ones free the host memory of gradients; late ones leave it to other copies until then."""
    step = whole(network(LAYERS))
    device = replace(HOSTED, disk_read_bytes_per_second=2e5, disk_write_bytes_per_second=2e5)
    seconds, policy = op_seconds(step, device), policy_named("auto:update=host")
    budget = floor_bytes(policy_named("auto"), step, device) * 5 // 4
    early = policy.plan(step, replace(device, host_bytes=0), budget)
    late = begun_when_free(step, early, simulate(step, early, device, seconds))
    device = replace(device, host_bytes=int(StoredCopies(step, early, device).held.max() * share))
    tried = [tiers_of(step, made, device, seconds)[1].step_seconds for made in (early, late)]
    assert max(tried) > 1.05 * min(tried)
    assert make_plan(step, device, policy, budget).step_seconds <= min(tried) * (1 + 1e-9)


def test_where_the_disk_limits_a_step_less_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    step = whole(network(LAYERS))
    policy = policy_named("auto")
    budget = floor_bytes(policy, step, DISK) * 3 // 2
    device = replace(DISK, disk_read_bytes_per_second=1e5, disk_write_bytes_per_second=1e5)
    host = make_plan(step, replace(device, host_bytes=1 << 40), policy, budget).tiers
    assert host is not None
    device = replace(device, host_bytes=host.host_peak_bytes // 2)
    chosen, choose = list[tuple[StoredCopies, float]](), StoredCopies.tiers
    monkeypatch.setattr(
        StoredCopies, "tiers", lambda of, timeline, early: chosen.append((of, early)) or choose(of, timeline, early)
    )
    weighed = make_plan(step, device, policy, budget)
    monkeypatch.setattr(host_updates, "AS_SLOW_AS_DISK", ())
    unweighed = make_plan(step, device, policy, budget)
    assert weighed.step_seconds < 0.95 * unweighed.step_seconds
    assert weighed.disk_written_bytes < unweighed.disk_written_bytes
    once = {(id(of.schedule.instructions), early) for of, early in chosen}
    assert len(once) == len(chosen)  # for the plan's own timeline it is not chosen again
