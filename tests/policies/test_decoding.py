"""The native decoder gives the plan of its plain twin: the same choice, schedule and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import with_moving_state
from tests.simulate.graphs import devices, networks

from overspill.core import Algorithm, Device, Graph
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


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_native_decoder_gives_what_its_twin_gives(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, seconds = Program(graph), op_seconds(graph, device)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + int(share * (int(program.live_bytes().max()) - least))
    program = program.with_algorithms(algorithms_within(program, budget))
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


@given(steps(), devices(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_a_plan_chose_is_found_in_another_program(graph: Graph, device: Device, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    program, seconds = Program(graph), op_seconds(graph, device)
    least = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    budget = least + int(share * (int(program.live_bytes().max()) - least))
    program = program.with_algorithms(algorithms_within(program, budget))
    decoders = Decoders(program, device, seconds, budget)
    nothing = gap_keys(program, ())
    before = decoders.fitting((), ())
    assert before is not None
    plan = before.decode(np.zeros(len(before)), before.among(nothing))

    trips = [c for c in plan.chosen.tolist() if before.trip_of[c] >= 0]
    assert np.flatnonzero(before.as_chosen(before, plan)).tolist() == sorted(trips)

    other = decoders.fitting([t for t in _remade(graph) if random.random() < 0.4], ())
    assert other is not None
    remade = twin.fitting(program, other.recompute, (), budget)
    assert remade is not None
    chosen = {_part(program, twin.candidates(program, device, seconds), c) for c in trips}
    among = twin.candidates(remade, device, seconds)
    kept = [c for c, one in enumerate(among) if one.gap is not None and _part(remade, among, c) in chosen]
    assert np.flatnonzero(other.as_chosen(before, plan)).tolist() == kept
    again = other.decode(np.zeros(len(other)), other.as_chosen(before, plan))
    check(graph, other.schedule(again, remade, "again", budget))


def _part(program: Program, among: Sequence[Candidate], number: int) -> tuple[tuple[int, int, int], str]:
    """A trip by its tensor and the ops at its ends, and the part of it that a candidate is."""
    candidate = among[number]
    assert candidate.gap is not None
    if candidate.offload_seconds or candidate.prefetch_seconds:
        return program.ends(candidate.gap), "away"
    leaving = candidate.spans[0][0] == candidate.gap.start + 1
    return program.ends(candidate.gap), "leaving" if leaving else "arriving"


def _remade(graph: Graph) -> set[int]:
    return {t for op in graph.ops for t in op.recompute_writes}
