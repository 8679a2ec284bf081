"""A schedule that is carried over to a graph with other ops in backward is valid there, or there is none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from tests.policies.test_search import budget_at
from tests.simulate.graphs import DEVICE, networks

from overspill.core import Graph, Phase
from overspill.planning.carried_over import carried_over
from overspill.policies import POLICIES
from overspill.simulate import check


@given(networks())
@settings(max_examples=30, deadline=None)
def test_to_the_same_graph_it_is_as_good(graph: Graph) -> None:
    made = POLICIES["auto"]().plan(graph, DEVICE, budget_at(graph, 0.2))
    carried = carried_over(made, graph, graph)
    assert carried is not None
    assert check(graph, carried).peak_bytes <= check(graph, made).peak_bytes


@given(networks())
@settings(max_examples=30, deadline=None)
def test_it_runs_the_ops_that_are_new(graph: Graph) -> None:
    made = POLICIES["in-core"]().plan(graph, DEVICE)
    last = max(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    again = replace(graph.ops[last], name="again", writes=(), reads=graph.ops[last].reads)
    ops = [*graph.ops[: last + 1], again, *graph.ops[last + 1 :]]
    other = replace(graph, ops=tuple(replace(op, id=i) for i, op in enumerate(ops)))
    carried = carried_over(made, graph, other)
    assert (carried is None) == (last == len(graph.ops) - 1)  # nothing that both have comes behind it
