"""The native decoder gives the plan of its plain twin: the same choice, schedule and times."""

from __future__ import annotations

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
from overspill.simulate import simulate


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


def _remade(graph: Graph) -> set[int]:
    return {t for op in graph.ops for t in op.recompute_writes}
