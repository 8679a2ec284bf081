"""The size of a card: what PyTorch's caching allocator takes over the first steps of a plan, and plans within it."""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.simulate.graphs import DEVICE, Build, Layer, network, schedule

from overspill.core import Graph, LayerType, Op, Phase, Places, Tensor, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import parse_bytes
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.allocators.planned import LIVE, PlannedAllocator
from overspill.placement.card import Card, _survives_on
from overspill.placement.card_events import _Run, events_of
from overspill.placement.events import ALLOCATE, EMPTY, FREE, Events
from overspill.placement.packing import DEFAULT
from overspill.placement.place import place_plan
from overspill.placement.replay import replay, replay_in_steps
from overspill.planning.effort import EFFORT
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.plans.fit import (
    EFFORT_GAIN,
    FIRST_EFFORT,
    FROM_FLOOR,
    GRID,
    HOPE,
    MANY_OPS,
    TRIES,
    UPWARDS,
    Fit,
    _Search,
    fit,
    least_of,
    on_grid,
    search,
    upwards_from,
)
from overspill.plans.plan import Plan, make_plan, unmanaged_peak
from overspill.simulate import trace_of

MIB = 1 << 20
STEP = network([Layer(3 * MIB + 512 * i) for i in range(16)])
CARD = Card(replace(DEVICE, context_bytes=300 * MIB), (8519680,))


def planned(budget: int, card: Card = CARD, graph: Graph = STEP) -> Plan:
    return search(graph, card, "auto", budget).plan()


def survives(plan: Plan, capacity_bytes: int, card: Card = CARD) -> bool:
    """Whether a card of this size is enough, without a retry."""
    events = events_of(plan.graph, plan.schedule, card.handle_bytes)
    done = replay(events, "pytorch", capacity_bytes=capacity_bytes - card.context_bytes, config=card.config)
    return done.fits and not done.retries


class Doubling(Card):
    """An allocator that takes twice the live bytes."""

    def placed(self, plan: Any) -> Any:
        return plan


@pytest.mark.parametrize(("room", "larger"), [(1950, FROM_FLOOR), (1500, 0)])
def test_no_larger_plan_is_looked_for_where_the_least_takes_far_more_than_the_room(room: int, larger: int) -> None:
    asked = []

    def make(live: int) -> Any:
        if live < 1000:
            raise InfeasibleBudgetError("infeasible", budget_bytes=live, floor_bytes=1000, cause="a test")
        asked.extend([live] if EFFORT.get() == 1 else [])
        graph = SimpleNamespace(tensors=(), ops=())
        return SimpleNamespace(
            peak_bytes=live, taken_bytes=2 * live, unmanaged_peak_bytes=4000, graph=graph, step_seconds=1.0
        )

    assert Fit(make, Doubling(DEVICE), DEVICE.context_bytes + room)._fastest(on_host=False) is None
    assert (min(asked), len(asked)) == (1000, 1 + larger)


@pytest.mark.parametrize(("most_seconds", "thorough"), [(math.inf, 1 + UPWARDS), (1.5, 0), (1.9, UPWARDS)])
def test_with_all_effort_plans_are_made_that_may_be_fast_enough_and_no_others(
    most_seconds: float, thorough: int
) -> None:
    made = []

    def make(live: int, effort: float) -> Any:
        made.append((live, effort))
        graph = SimpleNamespace(tensors=(), ops=())
        return SimpleNamespace(
            peak_bytes=live, taken_bytes=2 * live, graph=graph, slowdown=2.0, step_seconds=4000 / live
        )

    found = _Search(make, Doubling(DEVICE), 4000, 1.0, on_host=False).fastest(most_seconds)
    assert found is None or found.taken_bytes <= 4000
    asked = [live for live, effort in made if effort == 1]
    assert len(asked) == thorough
    quick = [live for live, effort in made if effort < 1]
    assert not any(4000 / live > EFFORT_GAIN * most_seconds and live >= one for live in quick for one in asked)


@dataclass(frozen=True)
class Made:
    """A plan that is the faster the more live bytes it has."""

    peak_bytes: int
    taken_bytes: int = 0
    places: None = None
    graph: Any = field(default_factory=lambda: SimpleNamespace(tensors=(), ops=()))

    @property
    def slowdown(self) -> float:
        return 1 + 2000 / self.peak_bytes

    step_seconds = slowdown


class Wasteful(Card):
    """Wastes half of what is beyond 3000 live bytes, or, if `overspill.allocator` has the blocks, as much as that."""

    is_steady = True

    def placed(self, plan: Any) -> Any:
        waste = max(0, plan.peak_bytes - 3000)
        return replace(plan, taken_bytes=plan.peak_bytes + (2 * waste if self.is_live else waste // 2))


def test_what_the_budget_leaves_over_is_used_and_of_all_ways_to_place_the_fastest_plan_counts() -> None:
    card = Wasteful(DEVICE, may_be_live=True)
    found: Any = Fit(cast("Any", Made), card, DEVICE.context_bytes + 5000)._fastest(on_host=False)
    assert 0.97 * 5000 <= found.taken_bytes <= 5000  # down by the excess alone it takes 4500, the last way 3667
    assert found.peak_bytes > 4300


class Taking(Card):
    """Takes 100 bytes more than are live in `overspill.allocator`, otherwise more than 5000 in any case."""

    @property
    def is_steady(self) -> bool:
        return True

    def placed(self, plan: Any) -> Any:
        live = plan.peak_bytes
        return SimpleNamespace(**vars(plan) | {"taken_bytes": live + 100 if self.is_live else 5000 + int(0.1 * live)})


def of_large_step(live: int, disk_seconds: float = 0.0, **figures: float) -> Any:
    """A plan of a step with so many ops that each takes seconds to make."""
    graph = SimpleNamespace(tensors=(), ops=range(MANY_OPS + 1))
    given: dict[str, Any] = {"step_seconds": 1 + 2000 / live, "disk_slowdown": 1.0, **figures}
    timeline = SimpleNamespace(disk_seconds=disk_seconds)
    return SimpleNamespace(peak_bytes=live, slowdown=2.0, graph=graph, places=None, timeline=timeline, **given)


@pytest.mark.parametrize(("disk_slowdown", "disk_seconds", "thorough"), [(1.0, 0.5, 1), (1.2, 0.5, 0), (1.0, 1.3, 0)])
def test_of_a_large_step_with_a_slow_disk_no_plan_is_made_with_all_effort(
    disk_slowdown: float, disk_seconds: float, thorough: int
) -> None:
    efforts = []

    def make(live: int, effort: float) -> Any:
        efforts.append(effort)
        return of_large_step(live, disk_slowdown=disk_slowdown, disk_seconds=disk_seconds)

    assert _Search(make, Taking(DEVICE).in_allocator, 5000, 1.0, on_host=False).fastest() is not None
    assert len(efforts) == 2 + thorough
    assert efforts.count(1.0) == thorough


@pytest.mark.parametrize("more", [1.05, 1.2])
def test_a_large_step_is_not_searched_where_its_fast_plans_take_far_more_than_there_is(more: float) -> None:
    """If they take little more, one of fewer bytes may be fast enough, too."""
    made = []

    def make(live: int, effort: float) -> Any:
        made.append((live, effort))
        return of_large_step(live, taken_bytes=more * live)

    found = _Search(make, Doubling(DEVICE), 4096, 1.0, on_host=False).fastest(1.01 * (1 + 2000 / 4096))
    assert (found is None) == (len(made) == 1) == (more > HOPE)


class Fragmented(Taking):
    """Takes that of `overspill.allocator`, otherwise a fifth more than is live."""

    @property
    def is_steady(self) -> bool:
        return self.is_live or self.solver is not None

    def placed(self, plan: Any) -> Any:
        taken = plan.peak_bytes + (100 if self.is_live else plan.peak_bytes // 5)
        return SimpleNamespace(**vars(plan) | {"taken_bytes": taken})


def test_no_plan_of_a_large_step_is_made_for_an_allocator_in_which_the_first_takes_far_too_much() -> None:
    asked = []

    def make(live: int) -> Any:
        asked.append(live)
        return of_large_step(live)

    card = Fragmented(DEVICE, solver=DEFAULT, always=False, may_be_live=True)
    found = Fit(make, card, DEVICE.context_bytes + 5000)._fastest(on_host=False)
    assert found is not None
    assert (found.taken_bytes, set(asked)) == (5000, {5000, 4900})


def test_a_faster_plan_of_fewer_bytes_that_another_way_to_place_has_tried_counts_too() -> None:
    """More bytes need not be faster, because no search foresees what a disk delays."""
    asked = []

    def make(live: int) -> Any:
        asked.append(live)
        return of_large_step(live, step_seconds={5000: 1.0, 4900: 2.0}.get(live, 1.5), disk_slowdown=1.2)

    found = Fit(make, Taking(DEVICE, may_be_live=True), DEVICE.context_bytes + 5000)._fastest(on_host=False)
    assert asked == [5000, 4500, 4900]
    assert found is not None
    assert (found.peak_bytes, found.taken_bytes) == (4500, 4600)


def test_a_budget_below_the_fewest_live_bytes_is_refused_after_one_plan_and_what_the_error_names_works() -> None:
    made = []

    def make(live: int) -> Plan:
        plan = make_plan(STEP, DEVICE, "auto", live)
        made.append(EFFORT.get())
        return plan

    with pytest.raises(InfeasibleBudgetError) as refused:
        Fit(make, CARD, CARD.context_bytes + MIB).plan()
    assert made == [FIRST_EFFORT]
    least = refused.value.floor_bytes
    assert (planned(least).device_bytes or 0) <= least


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0, 1.5])
def test_a_plan_survives_on_a_card_of_exactly_the_budget(share: float) -> None:
    whole = CARD.measured(make_plan(STEP, DEVICE, "auto", 1 << 40))
    assert whole.device_bytes is not None
    budget = CARD.context_bytes + int(share * (whole.device_bytes - CARD.context_bytes))
    plan = planned(budget)
    assert plan.device_budget_bytes == budget
    assert plan.device_bytes is not None
    assert plan.device_bytes <= budget
    assert survives(plan, budget)
    assert (share < 1) == (plan.offloaded_bytes + plan.recomputed_ops > 0)


def test_how_fast_a_plan_can_be_is_known_before_it_is_searched_for() -> None:
    taken = CARD.unmanaged(STEP) - CARD.context_bytes
    budget = CARD.context_bytes + int(0.7 * taken)
    found = search(STEP, CARD, "auto", budget)
    hoped = found.hoped
    assert hoped is not None
    plan = found.plan()
    assert hoped.slowdown < plan.slowdown
    assert replace(plan, plan_seconds=0) == replace(planned(budget), plan_seconds=0)


def test_what_fits_as_it_is_is_planned_once_and_no_size_is_planned_for_thrice() -> None:
    def tries(budget: int) -> list[int]:
        asked: list[int] = []
        fit(lambda live: (asked.append(live), make_plan(STEP, DEVICE, "auto", live))[1], CARD, budget)
        return asked

    assert len(tries(1 << 40)) == 1
    asked = tries(CARD.context_bytes + 60 * MIB)
    assert 1 < len(asked) <= TRIES + 1 + UPWARDS
    assert max(Counter(asked).values()) <= 2  # with little effort, and with all


def weights_in_turn() -> Graph:
    """A whole step of twelve weights of 64 MiB, of which each op reads one."""
    build = Build()
    weights = [build.tensor(64 * MIB, TensorKind.PARAMETER, persistent=True) for _ in range(12)]
    build.tensors = [replace(weight, movable=True) for weight in build.tensors]  # as in a whole step
    value = build.tensor(MIB, TensorKind.INPUT, persistent=True)
    for weight in [*weights, *reversed(weights)]:
        made = build.tensor(MIB)
        build.op([value, weight], [made], flops=10**9)
        value = made
    return replace(build.graph(), whole_step=True)


def trained_step(*, whole: bool) -> Graph:
    """A step of twelve weights, of which a `whole` one may move each with its state; its products are convolutions."""
    build = Build()
    weights = [build.tensor(16 * MIB + 512 * i, TensorKind.PARAMETER, persistent=True) for i in range(12)]
    states = [build.tensor(32 * MIB + 512 * i, TensorKind.OPTIMIZER_STATE, persistent=True) for i in range(12)]
    build.tensors = [replace(one, movable=whole) for one in build.tensors]
    values = [build.tensor(MIB, TensorKind.INPUT, persistent=True)]
    for weight in weights:
        values.append(build.tensor(9 * MIB))
        build.op([values[-2], weight], [values[-1]], flops=10**9, workspace_bytes=3 * MIB)
    gradients = [build.tensor(16 * MIB + 512 * i, TensorKind.GRADIENT) for i in range(12)]
    for weight, gradient in reversed([*zip(weights, gradients, strict=True)]):
        build.op([values.pop(), weight], [gradient], Phase.BACKWARD, flops=10**9)
    for gradient, *own in zip(gradients, weights, states, strict=True):
        build.op([gradient], [], Phase.UPDATE, kind=LayerType.UPDATE, state=own, workspace_bytes=5 * MIB)
    graph = build.graph()
    ops = tuple(replace(op, name="convolution") if op.phase is Phase.FORWARD else op for op in graph.ops)
    return replace(graph, ops=ops, whole_step=whole)


def test_a_card_without_room_for_the_weights_is_refused_after_few_plans_and_the_card_that_is_named_does() -> None:
    graph, card = weights_in_turn(), replace(CARD, model_on_host=False)
    asked: list[int] = []

    def make(live: int) -> Plan:
        asked.append(live)
        return make_plan(graph, DEVICE, "auto", live)

    with pytest.raises(InfeasibleBudgetError) as refused:
        # Live bytes may be fewer: weights that are away while others work.
        fit(make, card, card.context_bytes + 300 * MIB)
    assert len(asked) <= 3
    assert planned(refused.value.floor_bytes, card, graph).device_budget_bytes == refused.value.floor_bytes
    # With the model on the CPU a smaller card would do, which the error names.
    (change, *_) = refused.value.changes
    assert "CPU" in change.what
    assert change.nbytes < refused.value.floor_bytes
    assert planned(change.nbytes, replace(card, model_on_host=True), graph).device_budget_bytes == change.nbytes


@pytest.mark.parametrize("solver", [None, pytest.param(DEFAULT, marks=pytest.mark.long)])
def test_a_model_larger_than_the_card_begins_on_the_host_and_no_moment_has_all_of_it(solver: str | None) -> None:
    graph = weights_in_turn()
    graph = replace(graph, ops=tuple(replace(op, given=op.writes) for op in graph.ops))
    card = replace(CARD, solver=solver)
    whole = card.context_bytes + 800 * MIB
    assert not planned(whole, card, graph).model_on_host
    plan = planned(card.context_bytes + 300 * MIB, card, graph)
    assert plan.model_on_host
    assert plan.device_bytes is not None
    assert plan.device_bytes <= card.context_bytes + 300 * MIB
    begun = events_of(graph, plan.schedule, (), places=plan.places, model_on_host=True)
    assert begun.peak_requested_bytes < 300 * MIB
    assert events_of(graph, plan.schedule, (), places=plan.places).peak_requested_bytes > 12 * 64 * MIB
    # The least that an error names works too, and is of such a plan.
    with pytest.raises(InfeasibleBudgetError) as refused:
        planned(card.context_bytes + 10 * MIB, card, graph)
    assert planned(refused.value.floor_bytes, card, graph).model_on_host


def test_weights_that_stay_between_steps_come_from_the_host_before_the_first() -> None:
    build = Build()
    x = build.tensor(50, TensorKind.INPUT, persistent=True)
    stays, leaves = (build.tensor(n, TensorKind.PARAMETER, persistent=True) for n in (100, 5000))
    build.op([x, stays, leaves], [build.tensor(7000)])
    tensors = tuple(replace(t, movable=t.kind is TensorKind.PARAMETER) for t in build.graph().tensors)
    graph = replace(build.graph(), tensors=tensors, whole_step=True)
    done = replace(schedule((Verb.PREFETCH, leaves), (Verb.RUN, 0)), stored=(leaves,))

    def sizes(places: Places | None) -> list[int]:
        found = events_of(graph, done, steps=1, places=places, model_on_host=True)
        return [n for n in found.nbytes.tolist() if n]

    assert sizes(None) == [50, 100, 5000, 7000]
    inside = Places({(stays, 0): 0, (leaves, 0): 100}, 5100, 7050, between={stays: 0})
    assert sizes(inside) == [50, 5100, 7000]
    assert sizes(replace(inside, offsets={(leaves, 0): 0}, between={})) == [50, 5100, 100, 7000]


@pytest.mark.long
def test_cards_of_nearly_one_size_ask_for_the_same_live_bytes() -> None:
    asked: set[int] = set()
    for more in range(20):
        budget = CARD.context_bytes + (60 << 20) + more * 1000
        fit(lambda live: (asked.add(live), make_plan(STEP, DEVICE, "auto", live))[1], CARD, budget)
    assert len(asked) <= TRIES + UPWARDS  # as for one
    assert on_grid(1) == 1
    assert on_grid(1 << 30) == 1 << 30
    assert [size for size, _ in zip(upwards_from(1 << 30), range(GRID), strict=False)][-1] == 1 << 31
    assert all(on_grid(size) == size for size, _ in zip(upwards_from(1 << 20), range(200), strict=False))


def test_a_floor_that_rises_is_followed_to_what_is_made() -> None:
    floors = {1: 10, 10: 20}

    def make(live: int) -> str:
        if live in floors:
            raise InfeasibleBudgetError(
                "", budget_bytes=live, floor_bytes=floors[live], cause=f"the floor {floors[live]}"
            )
        return f"a plan of {live}"

    assert least_of(make) == (20, "a plan of 20", "the floor 20")
    floors[20] = 20
    with pytest.raises(InfeasibleBudgetError):
        least_of(make)


def test_a_budget_of_live_bytes_does_not_survive_on_such_a_card() -> None:
    """What was planned before: the budget's bytes as live bytes."""
    budget = unmanaged_peak(STEP, DEVICE)
    assert not survives(make_plan(STEP, DEVICE, "auto", budget), CARD.context_bytes + budget)


@pytest.mark.long
def test_what_no_card_of_this_size_can_do_names_the_card_that_can() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"310\.0 MiB .*300\.0 MiB") as error:
        planned(310 * MIB)
    needed = error.value.floor_bytes
    assert survives(planned(needed), needed)
    with pytest.raises(InfeasibleBudgetError):
        planned(needed - 2 * MIB)


def test_what_would_do_with_less_is_advised_and_does() -> None:
    uneven = network([Layer((11 + 5 * i) * MIB + 512) for i in range(12)])
    uneven = replace(uneven, ops=tuple(replace(op, given=op.writes) for op in uneven.ops))
    with pytest.raises(InfeasibleBudgetError) as error:
        planned(310 * MIB, graph=uneven)
    advice = str(error.value).split("smaller; ")[1]
    assert re.fullmatch(
        r'with overspill.allocator\("planned"\) \S+ MiB would do, with placement="planned" \S+ MiB would do, '
        "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\S+ MiB would do",
        advice,
    )
    live_bytes, planned_bytes, expanding_bytes = (change.nbytes for change in error.value.changes)
    assert live_bytes <= planned_bytes <= expanding_bytes < error.value.floor_bytes
    assert (planned(live_bytes, CARD.in_allocator, uneven).device_bytes or 0) <= live_bytes
    assert sum(part.nbytes for part in error.value.parts[:2]) == error.value.floor_bytes
    expandable = replace(CARD, config=CachingConfig(expandable_segments=True))
    with pytest.raises(InfeasibleBudgetError) as error:
        planned(310 * MIB, expandable, uneven)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in str(error.value)
    by_plan = replace(CARD, solver=DEFAULT)
    enough = parse_bytes(advice.split('="planned" ')[1].split(" would")[0]) + MIB
    assert (planned(enough, by_plan, uneven).device_bytes or 0) <= enough


@pytest.mark.parametrize("share", [0.7, 0.8, 1.0])
def test_a_plan_in_the_live_allocator_survives_on_its_card_and_gives_nothing_back_once_it_is_planned(
    share: float,
) -> None:
    """The allocator has no more memory than the budget from the first step on; all blocks lie apart."""
    card, graph = CARD.in_allocator, network([Layer((11 + 5 * (i % 5)) * MIB + 512) for i in range(16)])
    least = card.context_bytes + floor_of(StepProgram(graph)).nbytes
    budget = int(least + (share - 0.5) * (card.context_bytes + unmanaged_peak(graph, DEVICE) - least))
    plan = planned(budget, card, graph)
    assert plan.pool == LIVE
    assert least < (plan.device_bytes or 0) <= budget
    assert plan.offloaded_bytes + plan.recomputed_ops > 0
    ends: list[int] = []
    events = events_of(graph, plan.schedule, card.handle_bytes, steps=9, backwards=share == 0.8, ends=ends)
    live = PlannedAllocator(capacity_bytes=budget - card.context_bytes)
    retries = steps_apart(live, events, ends)
    assert len(retries) == 9
    assert len({*retries[3:]}) == 1
    assert live.counts.planned
    # In PyTorch's allocator such a plan takes more.
    assert CARD.placed(plan).taken_bytes > card.placed(plan).taken_bytes


def steps_apart(allocator: PlannedAllocator, events: Events, ends: list[int]) -> list[int]:
    """Serve the events, checking independently that no two live blocks share a byte; retries up to each end."""
    live: dict[int, tuple[int, int]] = {}
    starts: list[tuple[int, int]] = []
    retries = []
    rows = zip(events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), strict=True)
    for at, (action, block, nbytes) in enumerate(rows, 1):
        if action == FREE:
            starts.remove(live[block])
            allocator.free(live.pop(block)[0])
        else:
            start = allocator.allocate(nbytes)
            place = bisect(starts, (start, start + nbytes))
            assert place == 0 or starts[place - 1][1] <= start
            assert place == len(starts) or start + nbytes <= starts[place][0]
            live[block] = start, start + nbytes
            starts.insert(place, live[block])
        if at in ends:
            allocator.mark_step()
            retries.append(allocator.retries)
    return retries


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_is_enough_is_found_after_few_replays_where_it_is_likely_and_elsewhere_too(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = Random(seed)
    step: list[tuple[int, int, int, int]] = []
    live: list[int] = []
    for block in range(150):
        while len(live) > 40 or (live and r.random() < 0.45):
            step.append((FREE, live.pop(r.randrange(len(live))), 0, 0))
        step.append((ALLOCATE, block, r.randrange(2 * MIB, 90 * MIB), 0))
        live.append(block)
    step += [(FREE, block, 0, 0) for block in live]
    replays: list[int] = []
    monkeypatch.setattr(
        "overspill.placement.card.replay_in_steps", lambda *of: (replays.append(1), replay_in_steps(*of))[1]
    )

    def found(likely: int | None) -> tuple[int, int]:
        replays.clear()
        events, ends = Events.from_rows(step * 6), [len(step) * number for number in range(1, 7)]
        return _survives_on(events, ends, 0, likely), len(replays)

    enough, most = found(None)
    assert found(enough) == (enough, 2)
    assert most > 2
    assert {found(enough + by * MIB)[0] for by in (-enough // MIB, -40, -3, 3, 40, 2000)} == {enough}


def test_a_search_looks_for_the_memory_of_all_plans_but_the_first_where_that_of_the_first_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, graph = CARD.in_allocator, network([Layer((11 + 5 * (i % 5)) * MIB + 512) for i in range(16)])
    likely: list[float | None] = []
    placed = Card.placed
    monkeypatch.setattr(Card, "placed", lambda card, plan: (likely.append(card.likely_share), placed(card, plan))[1])
    planned(card.context_bytes + int(0.7 * unmanaged_peak(graph, DEVICE)), card, graph)
    assert likely[0] is None
    assert len({*likely[1:]}) == 1
    assert likely[1] is not None


def test_the_live_allocator_is_taken_only_where_pytorchs_costs_time() -> None:
    both = replace(CARD, solver=DEFAULT, always=False, may_be_live=True)
    graph = network([Layer((11 + 5 * (i % 5)) * MIB + 512) for i in range(16)])  # none of it in an arena
    ample = planned(both.context_bytes + 2 * unmanaged_peak(graph, DEVICE), both, graph)
    assert (ample.pool, ample.slowdown) == ("pytorch", 1)
    budget = both.context_bytes + int(0.7 * unmanaged_peak(graph, DEVICE))
    tight, alone = planned(budget, both, graph), planned(budget, CARD, graph)
    assert (tight.pool, alone.pool) == (LIVE, "pytorch")
    assert tight.step_seconds < alone.step_seconds
    assert tight.step_seconds == planned(budget, CARD.in_allocator, graph).step_seconds
    assert both.measured(tight).device_bytes == tight.device_bytes
    with pytest.raises(InfeasibleBudgetError, match=r"overspill\.allocator") as error:
        planned(both.context_bytes + MIB, both, graph)
    assert planned(error.value.floor_bytes, both, graph).pool == LIVE


def test_a_library_handle_comes_up_once_a_thread() -> None:
    products = replace(STEP, ops=tuple(replace(op, name="mm") for op in STEP.ops))
    plan = make_plan(products, DEVICE, "liveness", 1 << 40)
    assert [n for n in events_of(products, plan.schedule, (12345,)).nbytes.tolist() if n == 12345] == [12345] * 2
    whole = replace(products, whole_step=True)  # which one thread runs
    plan = make_plan(whole, DEVICE, "liveness", 1 << 40)
    assert [n for n in events_of(whole, plan.schedule, (12345,)).nbytes.tolist() if n == 12345] == [12345]


def test_the_state_of_an_optimizer_comes_with_the_first_update_in_pieces_of_the_parameters() -> None:
    """Parameters, the state that the first update makes, and the temporaries of three updates."""
    tensors = list(STEP.tensors)
    first = len(tensors)
    tensors += [
        Tensor(first + i, nbytes, kind, kind.value, (nbytes,), "uint8", persistent=True)
        for i, (nbytes, kind) in enumerate(
            [(1000, TensorKind.PARAMETER), (2000, TensorKind.PARAMETER), (6020, TensorKind.OPTIMIZER_STATE)]
        )
    ]
    update = Op(len(STEP.ops), "step.update", "", LayerType.UPDATE, Phase.UPDATE, (first, first + 1), (first,), 3012)
    graph = replace(STEP, tensors=tuple(tensors), ops=(*STEP.ops, update))
    sizes = events_of(graph, make_plan(graph, DEVICE, "liveness", 1 << 40).schedule).nbytes.tolist()
    assert [n for n in sizes if n in {1000, 2000, 20, 12}] == [
        1000, 2000, *(1000, 1000, 2000, 2000, 20), *(1000, 2000, 12) * 3,
    ]  # fmt: skip


def test_updates_that_one_call_carries_out_have_their_temporaries_at_once_but_for_the_first_time() -> None:
    """Two updates of 16 MiB of temporaries each, in three steps."""
    build = Build()
    weights = [build.tensor(16 * MIB, TensorKind.PARAMETER, persistent=True) for _ in range(2)]
    gradients = [build.tensor(16 * MIB, TensorKind.GRADIENT) for _ in weights]
    build.op(weights, gradients, Phase.BACKWARD)
    for weight, gradient in zip(weights, gradients, strict=True):
        build.op(
            [gradient], [], Phase.UPDATE, kind=LayerType.UPDATE, state=[weight], workspace_bytes=16 * MIB + 1024
        )  # fmt: skip
    graph = replace(build.graph(), whole_step=True)
    plan = make_plan(graph, DEVICE, "liveness", 1 << 40)
    done = schedule((Verb.RUN, 0), (Verb.RUN, 1), (Verb.RUN, 2), (Verb.FREE, gradients[0]), (Verb.FREE, gradients[1]))
    for groups, most in (((), 16), (((1, 2),), 32)):
        events = events_of(graph, done, groups=groups)
        assert events.nbytes.tolist().count(1024) == 6
        assert events.peak_requested_bytes == (4 * 16 + most) * MIB + 1024 * (1 + len(groups))
    grouped = replace(plan, schedule=done, groups=((1, 2),))
    apart = replace(plan, schedule=done)
    assert (
        trace_of(graph, done, grouped.groups).lower_bound_bytes - trace_of(graph, done).lower_bound_bytes
        == 16 * MIB + 1024
    )
    assert CARD.reserved_bytes(grouped) >= CARD.reserved_bytes(apart) + 16 * MIB
    assert place_plan(grouped).peak_bytes > place_plan(apart).peak_bytes


def test_results_workspaces_and_handles_come_in_the_order_in_which_kernels_take_them() -> None:
    build = Build()
    x = build.tensor(100, TensorKind.INPUT, persistent=True)
    out, mask, product = (build.tensor(n) for n in (5000, 1250, 7000))
    build.op([x], [out, mask])
    build.op([out], [product], workspace_bytes=300)
    dropout, matmul = build.graph().ops
    graph = replace(
        build.graph(), ops=(replace(dropout, name="native_dropout"), replace(matmul, name="mm")), whole_step=True
    )
    done = schedule((Verb.RUN, 0), (Verb.RUN, 1))

    def sizes(**how: bool) -> list[int]:
        return [n for n in events_of(graph, done, (64, 32), steps=1, **how).nbytes.tolist() if n]

    assert sizes() == [100, 1250, 5000, 7000, 64, 32, 300]
    assert sizes(backwards=True) == [100, 1250, 5000, 300, 7000, 64, 32]


def test_weights_that_leave_make_room_for_the_arena_of_a_whole_step_and_not_for_that_of_a_call() -> None:
    build = Build()
    stays, leaves = (build.tensor(n, TensorKind.PARAMETER, persistent=True) for n in (100, 5000))
    build.op([stays, leaves], [build.tensor(7000)])
    done = replace(schedule((Verb.PREFETCH, 1), (Verb.RUN, 0)), stored=(leaves,))
    places = Places({(leaves, 0): 100, (2, 1): 5100}, 12100, 0, between={stays: 0})

    def events(*, whole: bool) -> list[tuple[int, int]]:
        graph = replace(build.graph(), whole_step=whole)
        found = events_of(graph, done, places=places if whole else replace(places, between={}), steps=1)
        return list(zip(found.action.tolist(), found.nbytes.tolist(), strict=True))

    model = [(ALLOCATE, 100), (ALLOCATE, 5000)]
    assert events(whole=True) == [*model, (FREE, 0), (FREE, 0), (EMPTY, 0), (ALLOCATE, 12100)]
    assert events(whole=False) == [(ALLOCATE, 12100), *model, (FREE, 0)]


@pytest.mark.parametrize("how", [{}, {"backwards": True, "used": True}, {"model_on_host": True}])
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_like_the_last_has_its_events_and_is_not_gone_through_again(
    how: dict[str, bool], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with weights and state that come and go, gradients in groups, and convolutions."""
    graph = trained_step(whole=whole)
    done = make_plan(graph, DEVICE, "auto", floor_of(StepProgram(graph)).nbytes + 8 * MIB).schedule
    assert whole == bool(done.stored)
    through: list[bool] = []
    step = _Run.step
    monkeypatch.setattr(_Run, "step", lambda run: (through.append(run.is_first), step(run))[1])
    ends: list[int] = []
    groups = [tuple(op.id for op in graph.ops if op.phase is Phase.UPDATE)]

    def found() -> list[list[int]]:
        through.clear()
        ends.clear()
        events = events_of(graph, done, (64, 32), 0.5, 6, groups, ends=ends, **how)
        return [events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), [*ends]]

    repeated = found()
    assert through == [True, False]
    monkeypatch.setattr(_Run, "repeat", lambda run, _: run.step())
    assert found() == repeated
    assert len(through) == 6


def test_blocks_in_turn_lie_behind_the_results_before_them_and_handles_may_be_there_before() -> None:
    build = Build()
    x = build.tensor(100, kind=TensorKind.INPUT, persistent=True)
    of_input, of_weight = (build.tensor(n) for n in (5000, 1250))
    build.op([x], [of_input, of_weight], workspace_bytes=900)
    (backward,) = build.graph().ops
    graph = replace(
        build.graph(), ops=(replace(backward, name="convolution_backward", workspaces=(900, 300)),), whole_step=True
    )

    def sizes(**how: Any) -> list[int]:
        return [n for n in events_of(graph, schedule((Verb.RUN, 0)), (64,), steps=1, **how).nbytes.tolist() if n]

    assert sizes() == [100, 5000, 900, 1250, 300]
    assert sizes(backwards=True) == [100, 1250, 300, 5000, 900]
    assert sizes(share=0.5, used=True) == [64, 100, 5000, 450, 1250, 150]


def test_where_the_fewest_live_bytes_lie_badly_a_plan_of_more_is_taken() -> None:
    """A card on which the plan of fewest live bytes has no room, and one of more does."""
    small, large = (make_plan(STEP, DEVICE, policy, 1 << 40) for policy in ("auto", "liveness"))
    floor = 10 * MIB
    *_, well_placed = islice(upwards_from(floor), 4)

    def make(live: int) -> Plan:
        if live < floor:
            raise InfeasibleBudgetError("", budget_bytes=live, floor_bytes=floor, cause="that is how it is")
        return replace(small if live == floor else large, peak_bytes=live, unmanaged_peak_bytes=2 * floor)

    class Scattered(Card):
        def reserved_bytes(self, plan: Plan) -> int:
            return 15 * MIB if plan.peak_bytes == well_placed else 5 * floor

    card = Scattered(replace(DEVICE, context_bytes=300 * MIB))
    plan = fit(make, card, 320 * MIB)
    assert plan.peak_bytes == well_placed
    with pytest.raises(InfeasibleBudgetError, match=r"10\.0 MiB: that") as error:
        fit(make, card, 311 * MIB)
    assert error.value.floor_bytes == 315 * MIB
    # A budget below the fewest live bytes is answered by the plan of these, without a search.
    with pytest.raises(InfeasibleBudgetError) as far:
        fit(make, card, 302 * MIB)
    assert far.value.floor_bytes == 350 * MIB
    assert fit(make, card, error.value.floor_bytes).device_bytes == error.value.floor_bytes
