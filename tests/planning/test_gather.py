"""Updates gathered: the same work at no higher peak, in fewer groups, on a step by hand and on random plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import with_moving_state
from tests.simulate.graphs import DEVICE, Build, networks, recount, schedule

from overspill.core import Collective, CollectiveKind, Graph, LayerType, Phase, Schedule, TensorKind, Verb
from overspill.costs import op_seconds
from overspill.planning.effort import Effort
from overspill.planning.gather import MOST_TOGETHER, gather
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES
from overspill.policies.auto import Auto
from overspill.simulate import check, simulate

RUN, FREE, OUT, OUT_DONE = Verb.RUN, Verb.FREE, Verb.OFFLOAD, Verb.AWAIT_OFFLOAD


def step_of(count: int, workspace_bytes: int = 0, weight_bytes: int = 10, other_bytes: int = 1000) -> Graph:
    """For each weight an op that makes its gradient, and its update; between them, one that takes `other_bytes`."""
    build = Build()
    weights = [build.tensor(weight_bytes, TensorKind.PARAMETER, f"w{i}", persistent=True) for i in range(count)]
    for i, weight in enumerate(weights):
        gradient = build.tensor(weight_bytes, TensorKind.GRADIENT, f"g{i}")
        build.op([weight], [gradient], Phase.BACKWARD)
        build.op([weight, gradient], [weight], Phase.UPDATE, kind=LayerType.UPDATE, workspace_bytes=workspace_bytes)
        build.op([], [build.tensor(other_bytes)], Phase.BACKWARD)
    return replace(build.graph(), whole_step=True)


def one_by_one(count: int) -> Schedule:
    """Each weight's gradient, its update, and what comes between, with all freed at once."""
    made = []
    for i in range(count):
        gradient, other = count + 2 * i, count + 2 * i + 1
        made += [(RUN, 3 * i), (RUN, 3 * i + 1), (FREE, gradient), (RUN, 3 * i + 2), (FREE, other)]
    return schedule(*made)


def updates(graph: Graph) -> list[int]:
    return [op.id for op in graph.ops if op.layer_type is LayerType.UPDATE]


def live(graph: Graph, made: Schedule) -> tuple[int, ...]:
    return simulate(graph, made, DEVICE, op_seconds(graph, DEVICE)).live_bytes


def test_updates_wait_for_one_another_and_their_gradients_with_them() -> None:
    graph = step_of(3, weight_bytes=10)
    wide = replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], workspace_bytes=100)))  # so much room is there
    made, groups = gather(wide, one_by_one(3), updates(wide), live(wide, one_by_one(3)))
    assert groups == ((1, 4, 7),)
    assert [(i.verb, i.target) for i in made.instructions[-8:]] == [
        (RUN, 1), (RUN, 4), (RUN, 7), (FREE, 3), (FREE, 5), (FREE, 7), (RUN, 8), (FREE, 8),
    ]  # fmt: skip


def test_what_a_running_collective_takes_is_not_there_for_updates_to_wait_in() -> None:
    build = Build()
    weights = [build.tensor(10, TensorKind.PARAMETER, f"w{i}", persistent=True) for i in range(2)]
    whole, part, *gradients = (build.tensor(10) for _ in range(4))
    build.op([], [whole], Phase.BACKWARD)
    build.op([whole], [part], Phase.BACKWARD, workspace_bytes=1000)
    for weight, gradient in zip(weights, gradients, strict=True):
        build.op([weight], [gradient], Phase.BACKWARD)
        build.op([weight, gradient], [weight], Phase.UPDATE, kind=LayerType.UPDATE, workspace_bytes=50)
    graph = replace(build.graph(), whole_step=True)
    sends = replace(graph.ops[1], collective=Collective(CollectiveKind.SCATTER, 10, 2))
    graph = replace(graph, ops=(graph.ops[0], sends, *graph.ops[2:]))
    apart = schedule(
        (RUN, 0), (Verb.START, 1), (RUN, 2), (RUN, 3), (FREE, gradients[0]), (RUN, 4), (RUN, 5), (FREE, gradients[1]),
        (RUN, 1), (FREE, whole), (FREE, part),
    )  # fmt: skip
    made, groups = gather(graph, apart, updates(graph), live(graph, apart))
    assert check(graph, made).peak_bytes <= check(graph, apart).peak_bytes
    assert groups == ()


def test_without_room_for_gradients_to_wait_nothing_changes() -> None:
    graph = step_of(3)
    made, groups = gather(graph, one_by_one(3), updates(graph), live(graph, one_by_one(3)))
    assert (made, groups) == (one_by_one(3), ())


def test_what_updates_take_together_has_to_fit() -> None:
    plenty, scarce = (step_of(4, workspace_bytes=n) for n in (240, 600))
    room = replace(plenty.ops[-1], workspace_bytes=100)
    plenty, scarce = (replace(graph, ops=(*graph.ops[:-1], room)) for graph in (plenty, scarce))
    assert [len(group) for group in gather(plenty, one_by_one(4), updates(plenty), live(plenty, one_by_one(4)))[1]] == [
        4
    ]
    assert gather(scarce, one_by_one(4), updates(scarce), live(scarce, one_by_one(4)))[1] == ()


def test_an_update_is_done_before_its_weight_leaves() -> None:
    graph = step_of(2)
    graph = replace(graph, tensors=tuple(replace(t, movable=True) for t in graph.tensors), ops=(
        *graph.ops[:-1], replace(graph.ops[-1], workspace_bytes=100),
    ))  # fmt: skip
    before = one_by_one(2).instructions
    leaves = schedule((OUT, 0), (OUT_DONE, 0)).instructions
    planned = Schedule("by hand", (*before[:3], *leaves, *before[3:]), None)
    made, groups = gather(graph, planned, updates(graph), live(graph, planned))
    assert groups == ()
    assert made == replace(planned, instructions=made.instructions)
    assert [i.verb for i in made.instructions[1:5]] == [RUN, FREE, OUT, OUT_DONE]


def test_a_group_is_no_larger_than_pays() -> None:
    count = MOST_TOGETHER + 3
    graph = step_of(count, weight_bytes=1)
    graph = replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], workspace_bytes=10_000)))
    _, groups = gather(graph, one_by_one(count), updates(graph), live(graph, one_by_one(count)))
    assert [len(group) for group in groups] == [MOST_TOGETHER, 3]


@given(networks(), st.sampled_from([0.1, 0.3, 0.6, 1.0]), st.sampled_from(["auto", "liveness"]), st.integers(0, 3000))
@settings(max_examples=60, deadline=None)
def test_a_gathered_plan_does_the_same_at_no_higher_peak(graph: Graph, share: float, policy: str, work: int) -> None:
    graph = replace(with_moving_state(graph), whole_step=True)
    graph = replace(
        graph, ops=tuple(replace(o, workspace_bytes=work) if o.layer_type is LayerType.UPDATE else o for o in graph.ops)
    )
    if policy == "auto":
        top = unmanaged_peak(graph, DEVICE)
        least = check(graph, Auto(effort=Effort(evaluations=1)).plan(graph, DEVICE, top)).peak_bytes
        made = Auto(effort=Effort(evaluations=1)).plan(graph, DEVICE, least + int(share * (top - least)))
    else:
        made = POLICIES[policy]().plan(graph, DEVICE)
    gathered, groups = gather(graph, made, updates(graph), live(graph, made))
    assert check(graph, gathered).peak_bytes <= check(graph, made).peak_bytes
    assert Counter(gathered.instructions) == Counter(made.instructions)
    order = [i.target if i.verb is RUN else -1 for i in gathered.instructions]
    for group in groups:
        at = order.index(group[0])
        assert tuple(order[at : at + len(group)]) == group
        assert_fits(graph, gathered, at, group, check(graph, made).peak_bytes)


def assert_fits(graph: Graph, made: Schedule, at: int, group: tuple[int, ...], peak: int) -> None:
    """What is there when the group begins, and what all its updates take, is within the peak."""
    if not made.stored:  # which the naive recount does not know
        there = recount(graph, made)[at] - graph.ops[group[0]].workspace_bytes
        assert there + sum(graph.ops[op].workspace_bytes for op in group) <= peak
