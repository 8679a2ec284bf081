"""The native decoder and walk give the plans of their plain twins: the same choices, schedules and times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import with_moving_state
from tests.simulate.graphs import DEVICE, Build, devices, networks

from overspill.core import Algorithm, Device, Graph, Phase, TensorKind
from overspill.costs import op_seconds
from overspill.policies import twin
from overspill.policies._planning import Planner, Walk
from overspill.policies.algorithms import memory_optimal
from overspill.policies.decoding import Flags, flags, gap_keys, native_graph, planner_of, schedule_of
from overspill.policies.floor import algorithms_within, floor_of
from overspill.policies.program import Program
from overspill.policies.trips import candidates
from overspill.policies.units import Units, by_op
from overspill.policies.walk import Walk as TwinWalk
from overspill.simulate import check, simulate


@st.composite
def steps(draw: st.DrawFn) -> Graph:
    """A random step in which some ops have slower algorithms, and parameters may move."""
    graph = draw(networks())
    graph = with_moving_state(graph) if draw(st.booleans()) else graph
    menus = draw(st.lists(st.booleans(), min_size=len(graph.ops), max_size=len(graph.ops)))
    ops = []
    for op, menu in zip(graph.ops, menus, strict=True):
        algorithms = (Algorithm("fast", 9000), Algorithm("mean", 1000, 1.5), Algorithm("small", 0, 3.0))
        ops.append(replace(op, workspace_bytes=9000, algorithms=algorithms) if menu else op)
    return replace(graph, ops=tuple(ops))


def within(graph: Graph, share: float) -> tuple[Program, int]:
    """The program without recomputations, and the budget at `share` of the way from the least to what it takes."""
    program = Program(graph)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + int(share * (int(program.live_bytes().max()) - least))
    return program.with_algorithms(algorithms_within(program, budget)), budget


def planner(program: Program, device: Device, budget: int) -> Planner:
    seconds = op_seconds(program.graph, device)
    return planner_of(native_graph(program.graph, seconds), program, device, budget)


def remade(graph: Graph) -> list[int]:
    return [t for op in graph.ops for t in op.recompute_writes if not graph.tensors[t].persistent]


def chosen_flags(numbers: list[int], count: int) -> Flags:
    found = np.zeros(count, dtype=bool)
    found[numbers] = True
    return found


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_native_decoder_gives_what_its_twin_gives(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, budget, seconds = *within(graph, share), op_seconds(graph, device)
    recompute = [t for t in remade(graph) if random.random() < 0.4]
    fleeting = [t for t in recompute if random.random() < 0.5]

    found = planner(program, device, budget).fitting(flags(recompute, graph), flags(fleeting, graph))
    expected = twin.fitting(program, recompute, fleeting, budget)
    assert found is not None
    assert expected is not None
    decoder, (other, left) = found[0], expected
    assert found[1].tolist() == sorted(left)
    among = candidates(other, device, seconds)
    assert len(decoder) == len(among)
    away = [c.gap for c in among if c.gap is not None and random.random() < 0.2]
    ends = {other.ends(gap) for gap in away}
    first = [number for number, c in enumerate(among) if c.gap is not None and other.ends(c.gap) in ends]
    assert decoder.among(gap_keys(other, away)).tolist() == first

    whats = len(graph.tensors) + len(graph.ops)
    dearer = random.random(whats) * (random.random(whats) < 0.5) * 0.01
    plan = decoder.decode(dearer, chosen_flags(first, len(among)))
    plain = twin.decode(other, device, seconds, budget, dearer, chosen_flags(first, len(among)))
    assert plan.chosen.tolist() == plain.chosen
    schedule = schedule_of(decoder, plan, other, "twin", budget)
    assert schedule == plain.schedule
    assert plan.seconds == plain.seconds == simulate(graph, schedule, device, seconds).step_seconds
    assert plan.moved_bytes == plain.moved_bytes
    assert plan.peak_bytes == check(graph, schedule).peak_bytes
    assert plan.lost.tolist() == pytest.approx(plain.lost.tolist(), rel=1e-9, abs=1e-15)


def test_a_part_of_a_trip_makes_the_rest_of_it_cheaper() -> None:
    """The wait for one tensor to come back is taken first; then its copy is paid for, and that of another is not."""
    build = Build()
    image = build.tensor(8192, TensorKind.INPUT, persistent=True)
    one, other = build.tensor(20_000), build.tensor(21_000)
    gradients = [build.tensor(4, TensorKind.GRADIENT) for _ in range(6)]
    build.op([image], [one])
    build.op([one], [other])
    build.op([image], gradients[:1], Phase.BACKWARD, flops=25 * 10**6)
    build.op(gradients[:1], gradients[1:2], Phase.BACKWARD, flops=10**6, workspace_bytes=15_000)
    build.op(gradients[1:2], gradients[2:3], Phase.BACKWARD, flops=30 * 10**6)
    build.op([gradients[2], other], gradients[3:4], Phase.BACKWARD, flops=15 * 10**6, workspace_bytes=15_000)
    build.op([gradients[3], one], gradients[4:5], Phase.BACKWARD)
    build.op([gradients[4], other], gradients[5:6], Phase.BACKWARD)
    graph = build.graph()
    program, budget = Program(graph), 8192 + 41_000 + 8

    found = planner(program, DEVICE, budget).fitting(flags((), graph), flags((), graph))
    assert found is not None
    among = candidates(program, DEVICE, op_seconds(graph, DEVICE))
    parts = {(c.gap.tensor, c.spans): number for number, c in enumerate(among) if c.gap}
    assert (other, ((3, 4),)) in parts
    plan = found[0].decode(np.zeros(len(graph.tensors) + len(graph.ops)), np.zeros(len(among), dtype=bool))
    assert plan.chosen.tolist() == [parts[one, ((5, 6),)], parts[one, ((3, 5),)]]


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_a_plan_chose_is_found_in_another_program(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, budget, seconds = *within(graph, share), op_seconds(graph, device)
    making, nothing = planner(program, device, budget), np.zeros(len(graph.tensors) + len(graph.ops))
    fits = making.fitting(flags((), graph), flags((), graph))
    assert fits is not None
    before = fits[0]
    plan = before.decode(nothing, np.zeros(len(before), dtype=bool))

    among = candidates(program, device, seconds)
    trips = [c for c in plan.chosen.tolist() if among[c].gap]
    assert before.as_chosen(before, plan).tolist() == sorted(trips)

    recompute = [t for t in remade(graph) if random.random() < 0.4]
    found = making.fitting(flags(recompute, graph), flags((), graph))
    expected = twin.fitting(program, recompute, (), budget)
    assert found is not None
    assert expected is not None
    decoder, (other, _) = found[0], expected
    chosen = {(program.ends(gap), c.part) for c in (among[i] for i in trips) if (gap := c.gap)}
    now = candidates(other, device, seconds)
    kept = [i for i, c in enumerate(now) if c.gap and (other.ends(c.gap), c.part) in chosen]
    assert decoder.as_chosen(before, plan).tolist() == kept
    again = decoder.decode(nothing, chosen_flags(kept, len(now)))
    check(graph, schedule_of(decoder, again, other, "again", budget))


@given(steps(), devices(), st.floats(0, 0.5), st.sampled_from([0.05, 3.0]))
@settings(max_examples=30, deadline=None)
def test_the_native_walk_goes_where_its_twin_goes(graph: Graph, device: Device, share: float, steering: float) -> None:
    program, budget, seconds = *within(graph, share), op_seconds(graph, device)
    units = Units(graph, tuple(by_op(graph, remade(graph))))
    native = Walk(planner(program, device, budget), units.native)
    plain = TwinWalk(program, device, seconds, budget, units)
    gaps = [gap for gap in program.gaps if gap.end - gap.start > 2]
    for recompute, away in (((), ()), (remade(graph)[::2], ()), ((), gaps[::3])):
        native.begin(flags(recompute, graph), gap_keys(program, away))
        plain.begin(recompute, gap_keys(program, away))
    native.go_on(30, 1 << 60, steering, 0.01 * sum(seconds), 0.0)
    plain.go_on(30, steering, 0.01 * sum(seconds), 0.0)
    assert native.best is not None
    assert plain.best is not None
    assert (native.best.plan.seconds, native.best.plan.moved_bytes) == plain.best.plan.cost
    assert native.best.recompute.tolist() == sorted(plain.best.decision.recompute)
    assert native.best.fleeting.tolist() == sorted(plain.best.decision.fleeting)
    schedule = schedule_of(native.best.decoder, native.best.plan, plain.best.program, "twin", budget)
    assert schedule == plain.best.plan.schedule
    faster = replace(device, offload_bytes_per_second=3e6, prefetch_bytes_per_second=2e5)
    assert native.best.seconds_on(faster) == simulate(graph, schedule, faster, seconds).step_seconds
