"""Execution orders: Algorithm 1 on the block of Dymem's Fig. 10, its mirror image, and that no op can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.graphs import Build, networks

from overspill.core import Graph, Phase, TensorKind, numbered
from overspill.planning.assemble import assemble
from overspill.planning.order import depth_first, in_graph_order, reordered
from overspill.planning.step_program import StepProgram
from overspill.simulate import check

EXAMPLES = settings(max_examples=60, deadline=None)
FIG_10 = {0: (), 1: (0,), 2: (0,), 3: (0,), 4: (0,), 5: (1,), 6: (3,), 7: (4,), 8: (7,), 9: (5, 2, 6, 8)}
"""Inception-A (Fig. 10(a)): layer to the layers it reads; listed level by level, as a breadth-first search finds them."""


def block(sources: dict[int, Sequence[int]], nbytes: int = 1024) -> Graph:
    """Forward and backward of layers l0, l1, …; each backward reads the layer's inputs and its gradient."""
    build = Build()
    made = {i: build.tensor(nbytes, name=f"y{i}") for i in sources}
    for i, inputs in sources.items():
        build.op([made[s] for s in inputs], [made[i]], layer=f"l{i}")
    readers = {i: [j for j in sources if i in sources[j]] for i in sources}
    gradient = {(s, j): build.tensor(nbytes, TensorKind.OUTPUT_GRADIENT) for j in sources for s in sources[j]}
    for j in reversed(sources):
        build.op(
            [gradient[j, r] for r in readers[j]] + [made[s] for s in sources[j]],
            [gradient[s, j] for s in sources[j]], Phase.BACKWARD, layer=f"l{j}",
        )  # fmt: skip
    return build.graph()


def layers_in(graph: Graph, order: Sequence[int], phase: Phase) -> list[int]:
    return [int(graph.ops[op].layer[1:]) for op in order if graph.ops[op].phase is phase]


def liveness(graph: Graph) -> int:
    return check(graph, assemble(StepProgram(graph), (), "liveness", None)).peak_bytes


def test_the_inception_block_runs_branch_by_branch_as_in_figure_10b() -> None:
    graph = block(FIG_10)
    assert layers_in(graph, depth_first(graph), Phase.FORWARD) == [0, 1, 5, 2, 3, 6, 4, 7, 8, 9]


def test_backward_mirrors_forward() -> None:
    graph = block(FIG_10)
    assert layers_in(graph, depth_first(graph), Phase.BACKWARD) == [9, 8, 7, 4, 6, 3, 2, 5, 1, 0]


def test_branches_that_leave_one_by_one_need_less_memory() -> None:
    wide = {0: (), **dict.fromkeys(range(1, 5), (0,)), **{i + 4: (i,) for i in range(1, 5)}, 9: (5, 6, 7, 8)}
    graph = block(wide)
    # Each branch's first tensor is large and its last one small.
    tensors = tuple(replace(t, nbytes=100 if t.name in {"y5", "y6", "y7", "y8"} else t.nbytes) for t in graph.tensors)
    build = replace(graph, tensors=tensors, ops=tuple(op for op in graph.ops if op.phase is Phase.FORWARD))
    order = depth_first(build)
    assert layers_in(build, order, Phase.FORWARD) == [0, 1, 5, 2, 6, 3, 7, 4, 8, 9]
    assert liveness(reordered(build, order)) < liveness(build)


def test_a_join_is_taken_by_the_last_branch_that_reaches_it() -> None:
    # l1 reaches the join l3 first, and must leave it to l2.
    graph = block({0: (), 1: (0,), 2: (0,), 3: (1, 2)})
    assert layers_in(graph, depth_first(graph), Phase.FORWARD) == [0, 1, 2, 3]
    # A shortcut from the fork to the join is walked last: it was drawn last.
    graph = block({0: (), 1: (0,), 2: (1,), 3: (0, 2)})
    assert layers_in(graph, depth_first(graph), Phase.FORWARD) == [0, 1, 2, 3]


def test_an_update_in_place_waits_for_those_that_read_before_and_precedes_those_that_read_after() -> None:
    build = Build()
    state = build.tensor(8, TensorKind.BUFFER, persistent=True)
    a, b, c = (build.tensor(8) for _ in range(3))
    first = build.op([], [a])
    reads_before = build.op([state], [b])
    update = build.op([a, state], [state])
    reads_after = build.op([state], [c])
    # Depth first alone would update right after `first`.
    assert depth_first(build.graph()) == (first, reads_before, update, reads_after)


def test_random_ops_keep_their_order() -> None:
    build = Build()
    generator = build.tensor(0, TensorKind.BUFFER, "random state", persistent=True)
    made = [build.tensor(8) for _ in range(5)]
    build.op([], [made[0]])
    early = build.op([made[0]], [made[1]], state=[generator])
    late = build.op([made[0]], [made[2]], state=[generator])
    follower = build.op([made[1]], [made[3]])
    order = depth_first(build.graph())
    assert order.index(early) < order.index(late)
    assert order.index(follower) > order.index(early)


def test_an_op_that_touches_no_tensor_keeps_its_place_in_its_phase() -> None:
    graph = block(FIG_10)
    forward = len(FIG_10)
    lonely = replace(graph.ops[forward], name="step.rest", layer="", reads=(), writes=())
    ops = (*graph.ops[:forward], lonely, *graph.ops[forward:])
    order = depth_first(replace(graph, ops=numbered(ops)))
    assert order.index(forward) == forward


def test_backward_ops_without_a_forward_layer_go_with_the_one_before() -> None:
    build = Build()
    y = [build.tensor(8) for _ in range(3)]
    d = [build.tensor(8, TensorKind.OUTPUT_GRADIENT) for _ in range(5)]
    build.op([], [y[0]], layer="l0")
    build.op([y[0]], [y[1]], layer="l1")
    build.op([y[1]], [y[2]], layer="l2")
    tangents = build.op([], [d[0]], Phase.BACKWARD, layer="")
    late = build.op([], [d[4]], Phase.BACKWARD, layer="")
    last = build.op([d[0], y[1]], [d[1]], Phase.BACKWARD, layer="l2")
    total = build.op([d[1]], [d[2]], Phase.BACKWARD, layer="sum")
    first = build.op([d[1], d[4], y[0]], [d[3]], Phase.BACKWARD, layer="l1")
    assert depth_first(build.graph())[3:] == (tangents, late, last, total, first)


def test_a_chain_and_the_update_phase_stay_as_they_are() -> None:
    build = Build()
    weights = [build.tensor(8, TensorKind.PARAMETER, persistent=True) for _ in range(3)]
    y = build.tensor(8)
    build.op([weights[0]], [y])
    for weight in reversed(weights):
        build.op([weight], [weight], Phase.UPDATE)
    assert depth_first(build.graph()) == (0, 1, 2, 3)


@st.composite
def webs(draw: st.DrawFn) -> Graph:
    """Layers that read any layers before them, in backward too."""
    count = draw(st.integers(1, 14))
    sources = {i: tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(count)}
    return block(sources)


@given(st.one_of(webs(), networks()))
@EXAMPLES
def test_every_op_sees_what_it_sees_in_the_order_of_the_graph(graph: Graph) -> None:
    order = depth_first(graph)
    assert sorted(order) == list(range(len(graph.ops)))
    other = reordered(graph, order)
    assert [op.id for op in other.ops] == list(range(len(order)))
    made = assemble(StepProgram(other), (), "liveness", None)
    there = in_graph_order(made, order)
    assert check(graph, there).peak_bytes == check(other, made).peak_bytes
    assert there.targets(made.instructions[0].verb) == order


@pytest.mark.long
def test_thousands_of_layers_take_a_moment() -> None:
    deep = block({i: (i - 1,) if i else () for i in range(6000)})
    fan = block({0: (), **dict.fromkeys(range(1, 3000), (0,)), 3000: tuple(range(1, 3000))})
    begun = process_time()
    assert depth_first(deep) == tuple(range(12000))
    depth_first(fan)
    assert process_time() - begun < 2
