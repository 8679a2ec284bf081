"""The search of `auto` on steps of 20 to 500 ops: what native code says of a plan is true, and attempts only help."""

from __future__ import annotations

import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bounds.exhaustive import shortest
from tests.policies.plans import with_moving_state
from tests.simulate.graphs import DEVICE, Build, Layer, devices, long_networks, network, networks, tangles
from torch import Tensor, nn

import overspill
from overspill.core import Device, Graph, Phase, TensorKind, Verb
from overspill.costs import op_seconds
from overspill.planning.algorithms import memory_optimal
from overspill.planning.effort import Effort
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.policies.auto._search import Annealing
from overspill.policies.auto.native import flags, native_graph, planner_of
from overspill.policies.auto.remat_groups import RematGroups
from overspill.policies.auto.search import BestPlan, Search
from overspill.policies.auto.starts import Start, Starts
from overspill.simulate import check, simulate

STARTS_ONLY = Effort(evaluations=1)
BRIEF = Effort(evaluations=100_000, attempts_per_tensor=10)
SHARES = st.sampled_from([0.0, 0.01, 0.03, 0.1, 0.3, 0.6])


def budget_at(graph: Graph, share: float) -> int:
    """The budget at `share` of the way from the floor to what the step takes unmanaged."""
    program = StepProgram(graph)
    floor = floor_of(program.with_algorithms(memory_optimal(graph))).nbytes
    return floor + int(share * (int(program.live_bytes().max()) - floor))


def searched(graph: Graph, device: Device, budget: int, effort: Effort) -> BestPlan:
    return Search(StepProgram(graph), op_seconds(graph, device), device, budget, effort).best()


@given(long_networks() | tangles(), devices(), SHARES, st.booleans())
@settings(max_examples=30, deadline=None)
def test_seconds_bytes_moved_and_peak_of_a_plan_are_those_of_its_schedule(
    graph: Graph, device: Device, share: float, moving: bool
) -> None:
    graph = with_moving_state(graph) if moving else graph
    budget = budget_at(graph, share)
    found = searched(graph, device, budget, BRIEF)
    schedule = found.schedule("auto")
    timeline = simulate(graph, schedule, device, op_seconds(graph, device))
    assert check(graph, schedule).peak_bytes <= budget
    assert found.made.plan.peak_bytes <= budget
    assert found.made.plan.seconds == pytest.approx(timeline.step_seconds, rel=1e-9)
    assert found.made.plan.moved_bytes == sum(graph.tensors[t].nbytes for t in schedule.targets(Verb.OFFLOAD))


@pytest.mark.long
@given(long_networks(), devices(), SHARES)
@settings(max_examples=25, deadline=None)
def test_attempts_never_make_the_plan_slower_and_are_the_same_each_time(
    graph: Graph, device: Device, share: float
) -> None:
    budget = budget_at(graph, share)
    at_first, later, again = (searched(graph, device, budget, e) for e in (STARTS_ONLY, BRIEF, BRIEF))
    assert later.made.plan.seconds <= at_first.made.plan.seconds
    assert later.schedule("auto") == again.schedule("auto")


def test_attempts_find_faster_plans() -> None:
    sizes = [100_000 + 10_000 * (i * 7 % 5) for i in range(30)]
    graph = network([Layer(n, flops=10**7 * (1 + i % 3), saves_output=i % 2 == 0) for i, n in enumerate(sizes)])
    pairs = [[searched(graph, DEVICE, budget_at(graph, s), e) for e in (STARTS_ONLY, BRIEF)] for s in (0.0, 0.1, 0.3)]
    assert any(later.made.plan.seconds < 0.99 * first.made.plan.seconds for first, later in pairs)
    # With fewer evaluations than the starts alone take, too.
    few = [searched(graph, DEVICE, budget_at(graph, s), Effort(evaluations=6000)) for s in (0.0, 0.1, 0.3)]
    assert any(
        plan.made.plan.seconds < 0.99 * first.made.plan.seconds for plan, (first, _) in zip(few, pairs, strict=True)
    )


@given(networks(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_on_tiny_steps_the_plan_is_near_the_best_that_there_is(graph: Graph, share: float) -> None:
    if len(graph.ops) > 12:
        return
    budget, seconds = budget_at(graph, share), op_seconds(graph, DEVICE)
    best = shortest(graph, DEVICE, budget, seconds, 4_000)
    if best is not None:
        found = searched(graph, DEVICE, budget, Effort())
        assert best[0] * (1 - 1e-9) <= found.made.plan.seconds <= best[0] * 1.05


@pytest.mark.long
def test_a_loop_over_time_has_a_valid_plan_in_the_least_that_it_needs() -> None:
    """Its chains of small tensors are recomputed from one another; the search is long enough to try all kinds of that."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(20, 32, 3, 2, 1)
            self.loop, self.head = nn.GRU(32, 32, bidirectional=True, batch_first=True), nn.Linear(64, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.loop(self.conv(x).relu().mT)[0]).log_softmax(-1)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = overspill.compile(model, budget="smallest")
    compiled(torch.randn(4, 20, 60)).square().mean().backward()
    optimizer.step()
    assert compiled.overspill.plans


def test_groups_alike_are_of_as_many_bytes_by_the_same_kind_of_op() -> None:
    graph = network([Layer(size) for size in (100_000, 200_000, 100_000, 100_000, 100_000)])
    graph = replace(graph, ops=tuple(replace(op, name="pool" if op.id == 3 else "conv") for op in graph.ops))
    made = [graph.ops[i].writes[0] for i in range(5)]
    groups = RematGroups(graph, tuple(frozenset({t}) for t in made))
    assert groups.alike == [[0, 2, 4], [1], [0, 2, 4], [3], [0, 2, 4]]


def test_what_is_cheap_to_make_is_made_from_an_input_that_is_kept_where_that_is_dear() -> None:
    build = Build()
    image = build.tensor(8, TensorKind.INPUT, persistent=True)
    dear, cheap = build.tensor(1_000), build.tensor(1_000_000)
    build.op([image], [dear], again=True)
    build.op([dear], [cheap], again=True)
    build.op([cheap], [], Phase.BACKWARD)
    graph = build.graph()
    start = Starts(graph, (1.0, 0.001, 0.1), [frozenset({cheap})]).first(1)
    assert start == Start(recompute=(cheap,), kept=(dear,))
    for kept, again in (((), [0, 1]), (start.kept, [1])):
        steps = StepProgram(graph, start.recompute, kept=kept).steps
        assert [step.op for step in steps if step.recompute] == again


def test_control_c_ends_a_long_search() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    graph = network([Layer(100_000, flops=10**7) for _ in range(30)])
    endless = Effort(evaluations=10**15, attempts_per_tensor=10**9)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            searched(graph, DEVICE, budget_at(graph, 0.1), endless)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_annealing_without_a_start_or_of_another_graph_is_refused() -> None:
    graph, other = network([Layer(10_000)] * 2), network([Layer(10_000)] * 3)
    planner = planner_of(native_graph(graph, op_seconds(graph, DEVICE)), StepProgram(graph), DEVICE, 1 << 20)
    annealing = Annealing(planner, RematGroups(graph, ()).native)
    assert annealing.best is None
    with pytest.raises(ValueError, match="has no start"):
        annealing.anneal(1, 1, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="flag a tensor"):
        annealing.begin(flags((), graph), flags((), other))
    with pytest.raises(ValueError, match="another graph"):
        Annealing(planner, RematGroups(other, ()).native)
    with pytest.raises(ValueError, match="flag a tensor"):
        annealing.begin(np.zeros(1, dtype=bool), flags((), graph))
