"""From priorities to a timed plan: the trips that a program makes, when each moves, and what that costs on the clock.

The greedy choice of `select.py` among the candidates of `trips.py`, timed by `timing.py` and put on the clock of
`simulate`. A search asks for thousands of these, so they are native (native/search/decoder.hpp); here is what leads
there and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph, Phase, Schedule
from overspill.planning.algorithms import memory_optimal
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.gaps import may_move
from overspill.planning.step_program import Gap, Program

from . import _search

Flags = NDArray[np.bool_]
Seconds = NDArray[np.float64]
GapKeys = NDArray[np.int64]


def native_graph(graph: Graph, seconds: Sequence[float]) -> _search.Graph:
    """`graph`, of which op `i` takes `seconds[i]` with its fastest algorithm."""
    least = memory_optimal(graph)
    return _search.Graph(
        graph,
        np.array(seconds),
        np.array([op.phase is Phase.FORWARD for op in graph.ops]),
        np.array([may_move(tensor) for tensor in graph.tensors]),
        np.array([least.get(op.id, 0) for op in graph.ops], dtype=np.int32),
        graph.whole_step,
    )


def planner_of(native: _search.Graph, program: Program, device: Device, budget_bytes: int) -> _search.Planner:
    """What makes decoders for programs that recompute one thing or another, with the algorithms of `program`."""
    chosen = np.zeros(len(program.graph.ops), dtype=np.int32)
    chosen[list(program.algorithms)] = list(program.algorithms.values())
    return _search.Planner(native, chosen, device, budget_bytes)


def flags(tensors: Collection[int], graph: Graph) -> Flags:
    """One flag for each tensor of `graph`, set for these."""
    found = np.zeros(len(graph.tensors), dtype=bool)
    found[list(tensors)] = True
    return found


def schedule_of(
    decoder: _search.Decoder, plan: _search.Decoded, program: Program, policy: str, budget_bytes: int
) -> Schedule:
    """The schedule of a plan that `decoder` has made for `program`."""
    algorithms = dict(program.algorithms)
    slower = decoder.slower().reshape(-1, 2).tolist()
    first = len(decoder) - len(slower)
    for candidate in plan.chosen.tolist():
        if candidate >= first:
            op, number = slower[candidate - first]
            algorithms[op] = max(algorithms.get(op, 0), number)
    trips = decoder.trips().reshape(-1, 4)[plan.trips].tolist()
    transfers = [
        Transfer(Gap(tensor, start, end), copy, release, issue, end)
        for (tensor, start, end, copy), release, issue in zip(
            trips, plan.release.tolist(), plan.issue.tolist(), strict=True
        )
    ]
    return assemble(program.with_algorithms(algorithms), transfers, policy, budget_bytes)


def gap_keys(program: Program, gaps: Iterable[Gap]) -> GapKeys:
    """Numbers, in order, that stand for these gaps in every program of a graph: for their tensors and the ops at the ends."""
    ops = [*(step.op for step in program.steps), -1]
    keys = ((gap.tensor << 42) + (ops[gap.start] << 21) + ops[gap.end] for gap in gaps)
    return np.array(sorted(keys), dtype=np.int64)
