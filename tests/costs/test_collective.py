"""Collectives take what a ring does: the bytes that each rank passes on, and a latency for each hop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.costs.test_op_time import DEVICE, one_op

from overspill.core import Collective, CollectiveKind
from overspill.costs import op_seconds
from overspill.costs.collective import collective_seconds

LINKED = replace(
    DEVICE,
    link_bytes_per_second=10.0,
    link_latency_seconds=0.01,
    network_bytes_per_second=5.0,
    network_latency_seconds=0.1,
)


def seconds(kind: CollectiveKind, nbytes: int, ranks: int) -> float:
    return collective_seconds(Collective(kind, nbytes, ranks), LINKED)


def test_inside_a_node_the_link_bounds_it_and_a_reduction_goes_round_twice() -> None:
    assert seconds(CollectiveKind.GATHER, 400, 4) == pytest.approx(3 * 0.01 + 3 / 4 * 40)
    assert seconds(CollectiveKind.SCATTER, 400, 4) == seconds(CollectiveKind.GATHER, 400, 4)
    assert seconds(CollectiveKind.REDUCE, 400, 4) == pytest.approx(2 * seconds(CollectiveKind.GATHER, 400, 4))


def test_between_nodes_the_slower_of_link_and_network_does() -> None:
    assert seconds(CollectiveKind.GATHER, 400, 16) == pytest.approx(14 * 0.01 + 0.1 + 15 / 16 * 80)


def test_one_rank_sends_nothing() -> None:
    assert seconds(CollectiveKind.GATHER, 400, 1) == 0


def test_without_a_link_all_goes_through_the_host() -> None:
    graph = one_op(0, 0)
    sends = replace(graph, ops=(replace(graph.ops[0], collective=Collective(CollectiveKind.GATHER, 40, 2)),))
    assert op_seconds(sends, DEVICE) == (pytest.approx(0.5 + 20),)
