"""The search of `auto`: what its changes reach, and that going on from the best plan loses nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import DEVICE, Layer, devices, network, networks

from overspill.core import Algorithm, Device, Graph
from overspill.costs import op_seconds
from overspill.policies import search
from overspill.policies._planning import Walk
from overspill.policies.changes import Changes, Decision
from overspill.policies.decoding import flags, gap_keys, native_graph, planner_of
from overspill.policies.floor import floor_of
from overspill.policies.planning import unmanaged_peak
from overspill.policies.program import Program
from overspill.policies.randoms import Random
from overspill.policies.search import Attempt, Ground, Search
from overspill.policies.units import Units, most_dearer


def searched(graph: Graph, device: Device, share: float, patience: int = 0, **constants: Any) -> Attempt:
    """The best plan at `share` of the way from the floor to what the step takes unmanaged."""
    program = Program(graph)
    floor = floor_of(program).nbytes
    budget = floor + int(share * (unmanaged_peak(graph, device) - floor))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(search, name, value)
        return Search(Ground(program, op_seconds(graph, device)), device, budget, patience=patience).best()


@given(networks(), devices(), st.sampled_from([0.0, 0.1, 0.5]))
@settings(max_examples=20, deadline=None)
def test_going_on_from_the_best_plan_is_never_slower(graph: Graph, device: Device, share: float) -> None:
    once = searched(graph, device, share, MORE_ATTEMPTS_EACH=0)
    assert searched(graph, device, share, MORE_ATTEMPTS_EACH=20).cost <= once.cost


def test_steering_makes_slower_algorithms_dearer_as_well() -> None:
    graph = network([Layer(100_000) for _ in range(4)])
    menu = (Algorithm("fast", 5000), Algorithm("slow", 0, 3.0))
    graph = replace(graph, ops=(replace(graph.ops[0], workspace_bytes=5000, algorithms=menu), *graph.ops[1:]))
    nothing = np.zeros(len(graph.tensors) + len(graph.ops))
    decision = Decision(frozenset(), frozenset(), nothing, np.array([], dtype=np.int64))

    def dearest(share: float) -> float:
        units = Units(graph, tuple(frozenset(op.writes) for op in graph.ops[:3]))
        changes = Changes(units, most_dearer(graph, DEVICE, [1.0] * len(graph.ops)), share, Random(0))
        return max(changes.of(decision, nothing).dearer[len(graph.tensors)] for _ in range(2000))

    assert dearest(0.0) == 0.0
    assert 1.0 < dearest(10.0) <= 2.0  # it loses two seconds


def test_units_alike_are_of_as_many_bytes_by_the_same_kind_of_op_and_change_together() -> None:
    graph = network([Layer(size) for size in (100_000, 200_000, 100_000, 100_000, 100_000)])
    graph = replace(graph, ops=tuple(replace(op, name="pool" if op.id == 3 else "conv") for op in graph.ops))
    made = [graph.ops[i].writes[0] for i in range(5)]
    units = Units(graph, tuple(frozenset({t}) for t in made))
    changes = Changes(units, most_dearer(graph, DEVICE, [1.0] * len(graph.ops)), 0.05, Random(0))
    assert units.alike == [[0, 2, 4], [1], [0, 2, 4], [3], [0, 2, 4]]
    nothing = np.zeros(len(graph.tensors) + len(graph.ops))
    kept = Decision(frozenset(), frozenset(), nothing, np.array([], dtype=np.int64))
    reached = {changes._alike(kept, nothing).recompute for _ in range(500)}
    assert frozenset({made[0], made[2], made[4]}) in reached
    assert frozenset({made[0], made[1]}) not in reached


def test_control_c_ends_a_long_search() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    graph = network([Layer(100_000, flops=10**7) for _ in range(30)])
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            searched(graph, DEVICE, 0.1, EFFORT=10**15, ATTEMPTS_EACH=10**9)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_walk_that_has_not_begun_or_is_of_another_graph_is_refused() -> None:
    graph, other = network([Layer(10_000)] * 2), network([Layer(10_000)] * 3)
    seconds = op_seconds(graph, DEVICE)
    planner = planner_of(native_graph(graph, seconds), Program(graph), DEVICE, 1 << 20)
    walk = Walk(planner, Units(graph, ()).native)
    assert walk.best is None
    with pytest.raises(ValueError, match="has not begun"):
        walk.go_on(1, 1, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="one flag a tensor"):
        walk.begin(flags((), other), gap_keys(Program(graph), ()))
    with pytest.raises(ValueError, match="another graph"):
        Walk(planner, Units(other, ()).native)


def test_a_patient_search_is_never_slower_and_often_faster() -> None:
    sizes = [100_000 + 10_000 * (i * 7 % 5) for i in range(30)]
    graph = network([Layer(n, flops=10**7 * (1 + i % 3), saves_output=i % 2 == 0) for i, n in enumerate(sizes)])
    pairs = []
    for share in (0.0, 0.1, 0.3):
        usual, patient = (searched(graph, DEVICE, share, p, EFFORT=50_000, MORE_EFFORT=80_000) for p in (0, 20))
        pairs.append((usual, patient))
    assert all(patient.cost <= usual.cost for usual, patient in pairs)
    assert any(patient.seconds < usual.seconds for usual, patient in pairs)
