"""Collectives started apart from their ends: valid, within the budget, no slower, and counted alike by all machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, Build, devices, networks, schedule

from overspill.capture.sharding import Group, Sharding, sharded
from overspill.core import Collective, CollectiveKind, Device, Graph, Phase, Stream, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError, InvalidScheduleError
from overspill.costs import op_seconds
from overspill.placement.place import place_plan
from overspill.planning.overlap import overlapped
from overspill.plans.plan import make_plan
from overspill.policies import POLICIES
from overspill.policies.in_core import Liveness
from overspill.report.page import write_page
from overspill.report.plan import plan_page
from overspill.report.tracing import write_plan_snapshot, write_plan_trace
from overspill.simulate import check, simulate, trace_of

RUN, AGAIN, START, FREE = Verb.RUN, Verb.RECOMPUTE, Verb.START, Verb.FREE


def sharded_networks(ranks: int = 3) -> st.SearchStrategy[Graph]:
    """Random steps of one of several ranks; each weight is a group, or all are one."""

    def build(graph: Graph, together: bool, again: bool) -> Graph:
        names = [t.name for t in graph.tensors if t.kind is TensorKind.PARAMETER]
        groups = [names] if together else [[name] for name in names]
        sharding = Sharding(ranks, tuple(Group(of[0], tuple(of), again) for of in groups if of))
        return sharded(replace(graph, whole_step=True), sharding)

    return st.builds(build, networks(), st.booleans(), st.booleans())


@given(sharded_networks(), devices(), st.sampled_from(["liveness", "oracle", "auto"]), st.sampled_from([0.5, 0.8, 1.0]))
@settings(max_examples=40, deadline=None)
def test_schedules_of_sharded_steps_are_counted_alike(graph: Graph, device: Device, policy: str, share: float) -> None:
    budget = int(share * check(graph, Liveness().plan(graph, device)).peak_bytes)
    try:
        made = POLICIES[policy]().plan(graph, device, budget if policy == "auto" else None)
    except InfeasibleBudgetError as error:
        made = POLICIES[policy]().plan(graph, device, error.floor_bytes)
    seconds = op_seconds(graph, device)
    timeline = simulate(graph, made, device, seconds)
    assert timeline.peak_bytes == check(graph, made).peak_bytes == trace_of(graph, made).lower_bound_bytes
    together = replace(made, instructions=tuple(i for i in made.instructions if i.verb is not START))
    assert timeline.step_seconds <= simulate(graph, together, device, seconds).step_seconds * (1 + 1e-9) + 1e-3
    sent = sum(op.collective is not None for op in graph.ops)
    again = sum(graph.ops[op].collective is not None for op in made.targets(AGAIN))
    assert sum(event.stream is Stream.COMMUNICATION for event in timeline.events) == sent + again


@pytest.fixture
def graph() -> Graph:
    """op0 gathers a shard, op1 computes, op2 reads what was gathered and makes a gradient, op3 scatters it, op4 computes."""
    build = Build()
    shard = build.tensor(10, TensorKind.PARAMETER, "w", persistent=True)
    whole, x, gradient, part = build.tensor(20), build.tensor(4), build.tensor(20), build.tensor(10)
    build.op([shard], [whole], again=True, workspace_bytes=5)
    build.op([], [x])
    build.op([whole, x], [gradient], Phase.BACKWARD)
    build.op([gradient], [part], Phase.BACKWARD)
    build.op([x], [], Phase.BACKWARD)
    made = replace(build.graph(), whole_step=True)
    kinds = {0: CollectiveKind.GATHER, 3: CollectiveKind.SCATTER}
    ops = (replace(op, collective=Collective(kinds[op.id], 20, 2)) if op.id in kinds else op for op in made.ops)
    return replace(made, ops=tuple(ops))


SHARD, WHOLE, X, GRADIENT, PART = range(5)
IN_ORDER = schedule(
    (RUN, 1), (RUN, 0), (RUN, 2), (FREE, WHOLE), (RUN, 3), (FREE, GRADIENT), (RUN, 4), (FREE, X), (FREE, PART)
)
SECONDS = (1.0, 2.0, 1.0, 1.0, 2.0)


def test_a_gather_starts_ahead_and_a_scatter_ends_late(graph: Graph) -> None:
    made = overlapped(graph, IN_ORDER, DEVICE, SECONDS, None)
    order = [(i.verb, i.target) for i in made.instructions]
    assert order == [
        (START, 0), (RUN, 1), (RUN, 0), (RUN, 2), (FREE, WHOLE), (START, 3), (RUN, 4), (RUN, 3), (FREE, GRADIENT), (FREE, X),
        (FREE, PART),
    ]  # fmt: skip
    check(graph, made)
    timeline = simulate(graph, made, DEVICE, SECONDS)
    assert (timeline.step_seconds, timeline.communication_seconds) == (5.0, 2.0)
    assert timeline.exposed_communication_seconds == 0
    alone = simulate(graph, IN_ORDER, DEVICE, SECONDS)
    assert (alone.step_seconds, alone.exposed_communication_seconds) == (7.0, 2.0)
    assert alone.wait_seconds == {"gather of layer0": 1.0, "scatter of layer3": 1.0}


def test_without_room_it_starts_where_it_is_waited_for(graph: Graph) -> None:
    peak = check(graph, IN_ORDER).peak_bytes
    made = overlapped(graph, IN_ORDER, DEVICE, SECONDS, peak)
    assert check(graph, made).peak_bytes == peak
    assert overlapped(graph, made, DEVICE, SECONDS, peak) == made


def test_bytes_count_from_the_start(graph: Graph) -> None:
    made = schedule((START, 0), *((i.verb, i.target) for i in IN_ORDER.instructions))
    assert simulate(graph, made, DEVICE, SECONDS).live_bytes[:3] == (35, 39, 39)


@pytest.mark.parametrize(
    ("instructions", "error"),
    [
        ([(START, 1)], "no collective"),
        ([(START, 0), (START, 0)], "runs already"),
        ([(START, 0), (RUN, 1), (RUN, 2)], "which is arriving"),
        ([(START, 0), (FREE, WHOLE)], "not present"),
        ([(RUN, 1), (RUN, 0), (RUN, 2), (START, 3), (FREE, GRADIENT)], "runs reads t3"),
        ([(START, 3)], "which is absent"),
        ([*((i.verb, i.target) for i in IN_ORDER.instructions), (START, 0)], "the collective op0"),
    ],
)
def test_what_a_start_breaks_is_named(graph: Graph, instructions: list[tuple[Verb, int]], error: str) -> None:
    with pytest.raises(InvalidScheduleError, match=error):
        check(graph, schedule(*instructions))


def test_what_draws_and_places_plans_knows_collectives(graph: Graph, tmp_path: Path) -> None:
    plan = make_plan(graph, replace(DEVICE, kind="cuda", memory_bytes=1 << 30), "liveness", 1 << 20)
    assert any(i.verb is START for i in plan.schedule.instructions)
    write_plan_trace(plan, tmp_path / "trace.json")
    write_plan_snapshot(plan, tmp_path / "memory.pickle")
    assert "communication" in (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert place_plan(plan, None).peak_bytes >= plan.peak_bytes
    write_page(tmp_path / "plan.html", plan_page(plan, "a plan", None))
