"""The native decoder gives the plan of its plain twin: the same choice, schedule and times."""

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
from overspill.policies.algorithms import memory_optimal
from overspill.policies.decoding import Decoders, gap_keys
from overspill.policies.floor import algorithms_within, floor_of
from overspill.policies.program import Program
from overspill.policies.select import Candidate
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


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_native_decoder_gives_what_its_twin_gives(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, budget, seconds = *within(graph, share), op_seconds(graph, device)
    made = [t.id for t in graph.tensors if t.id in graph.producer]
    recompute = frozenset(t for t in made if random.random() < 0.4 and t in _remade(graph))
    fleeting = frozenset(t for t in recompute if random.random() < 0.5)

    found = Decoders(program, device, seconds, budget).fitting(recompute, fleeting)
    expected = twin.fitting(program, recompute, fleeting, budget)
    assert found is not None
    assert expected is not None
    among = twin.candidates(expected, device, seconds)
    assert len(found) == len(among)
    away = [c.gap for c in among if c.gap is not None and random.random() < 0.2]
    first = found.among(gap_keys(expected, away))
    ends = {expected.ends(gap) for gap in away}
    assert first.tolist() == [c.gap is not None and expected.ends(c.gap) in ends for c in among]

    dearer = random.random(len(among)) * (random.random(len(among)) < 0.5) * 0.01
    plan = found.decode(dearer, first)
    plain = twin.decode(expected, device, seconds, budget, dearer, first)
    assert plan.chosen.tolist() == plain.chosen
    schedule = found.schedule(plan, expected, "twin", budget)
    assert schedule == plain.schedule
    assert plan.seconds == plain.seconds == simulate(graph, schedule, device, seconds).step_seconds
    assert plan.lost.tolist() == pytest.approx(plain.lost, rel=1e-9, abs=1e-15)


def test_a_part_of_a_trip_makes_the_rest_of_it_cheaper() -> None:
    """The wait for one tensor to come back is taken first; then its copy is paid for, and another tensor is dearer."""
    build = Build()
    image = build.tensor(8192, TensorKind.INPUT, persistent=True)
    one, other = build.tensor(20_000), build.tensor(20_000)
    gradients = [build.tensor(4, TensorKind.GRADIENT) for _ in range(6)]
    build.op([image], [one])
    build.op([one], [other])
    build.op([image], gradients[:1], Phase.BACKWARD, flops=25 * 10**6)
    build.op(gradients[:1], gradients[1:2], Phase.BACKWARD, flops=10**6, workspace_bytes=15_000)
    build.op(gradients[1:2], gradients[2:3], Phase.BACKWARD, flops=30 * 10**6)
    build.op(gradients[2:3], gradients[3:4], Phase.BACKWARD, flops=15 * 10**6, workspace_bytes=15_000)
    build.op([gradients[3], one], gradients[4:5], Phase.BACKWARD)
    build.op([gradients[4], other], gradients[5:6], Phase.BACKWARD)
    graph = build.graph()
    program, budget = Program(graph), 8192 + 2 * 20_000 + 8

    found = Decoders(program, DEVICE, op_seconds(graph, DEVICE), budget).fitting((), ())
    assert found is not None
    among = twin.candidates(program, DEVICE, op_seconds(graph, DEVICE))
    parts = {(c.gap.tensor, c.spans): number for number, c in enumerate(among) if c.gap}
    away, arriving = parts[one, ((3, 5),)], parts[one, ((5, 6),)]
    dearer = np.zeros(len(among))
    dearer[[away, parts[other, ((5, 7),)]]] = 0.005
    plan = found.decode(dearer, np.zeros(len(among), dtype=bool))
    assert plan.chosen.tolist() == [arriving, away]


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_a_plan_chose_is_found_in_another_program(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, budget, seconds = *within(graph, share), op_seconds(graph, device)
    decoders = Decoders(program, device, seconds, budget)
    before = decoders.fitting((), ())
    assert before is not None
    plan = before.decode(np.zeros(len(before)), before.among(gap_keys(program, ())))

    trips = [c for c in plan.chosen.tolist() if before.trip_of[c] >= 0]
    assert np.flatnonzero(before.as_chosen(before, plan)).tolist() == sorted(trips)

    other = decoders.fitting([t for t in _remade(graph) if random.random() < 0.4], ())
    assert other is not None
    remade = twin.fitting(program, other.recompute, (), budget)
    assert remade is not None
    among = twin.candidates(program, device, seconds)
    chosen = {_part(program, among[c]) for c in trips}
    kept = [
        c for c, one in enumerate(twin.candidates(remade, device, seconds)) if one.gap and _part(remade, one) in chosen
    ]
    assert np.flatnonzero(other.as_chosen(before, plan)).tolist() == kept
    again = other.decode(np.zeros(len(other)), other.as_chosen(before, plan))
    check(graph, other.schedule(again, remade, "again", budget))


def _part(program: Program, candidate: Candidate) -> tuple[tuple[int, int, int], str]:
    """A trip by its tensor and the ops at its ends, and the part of it that a candidate is."""
    assert candidate.gap is not None
    if candidate.offload_seconds or candidate.prefetch_seconds:
        return program.ends(candidate.gap), "away"
    leaving = candidate.spans[0][0] == candidate.gap.start + 1
    return program.ends(candidate.gap), "leaving" if leaving else "arriving"


def _remade(graph: Graph) -> set[int]:
    return {t for op in graph.ops for t in op.recompute_writes}
