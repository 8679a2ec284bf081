"""Convert Graphs for the native search (native/search/), and its plans to Schedules."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph, Phase, Schedule
from overspill.planning.algorithms import memory_optimal
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.gaps import may_move
from overspill.planning.step_program import Gap, StepProgram

from . import _search

Flags = NDArray[np.bool_]


def native_graph(graph: Graph, seconds: Sequence[float], staying: Collection[int] = ()) -> _search.Graph:
    """Return `graph` for native code.

    Op `i` takes `seconds[i]` with its fastest algorithm. Tensors in `staying` are not offloaded.
    """
    least = memory_optimal(graph)
    return _search.Graph(
        graph,
        np.array(seconds),
        np.array([op.phase is Phase.FORWARD for op in graph.ops]),
        np.array([may_move(tensor) and tensor.id not in staying for tensor in graph.tensors]),
        np.array([least.get(op.id, 0) for op in graph.ops], dtype=np.int32),
        graph.whole_step,
    )


def planner_of(native: _search.Graph, program: StepProgram, device: Device, budget_bytes: int) -> _search.Planner:
    """Return a native planner, which makes list schedulers for programs with different recomputations."""
    chosen = np.zeros(len(program.graph.ops), dtype=np.int32)
    chosen[list(program.algorithms)] = list(program.algorithms.values())
    return _search.Planner(native, chosen, device, budget_bytes)


def flags(tensors: Collection[int], graph: Graph) -> Flags:
    """Return a boolean array over the tensors of `graph`, true for `tensors`."""
    found = np.zeros(len(graph.tensors), dtype=bool)
    found[list(tensors)] = True
    return found


def schedule_of(
    scheduler: _search.ListScheduler, plan: _search.TimedPlan, program: StepProgram, policy: str, budget_bytes: int
) -> Schedule:
    """Return the schedule of a plan that `scheduler` made for `program`."""
    # Slower algorithms that the plan takes come last among its candidates.
    algorithms = dict(program.algorithms)
    slower = scheduler.slower().reshape(-1, 2).tolist()
    first = len(scheduler) - len(slower)
    for candidate in plan.chosen.tolist():
        if candidate >= first:
            op, number = slower[candidate - first]
            algorithms[op] = max(algorithms.get(op, 0), number)
    # Its swaps, with the times of their transfers.
    swaps = scheduler.swaps().reshape(-1, 4)[plan.swaps].tolist()
    transfers = [
        Transfer(Gap(tensor, start, end), copy, release, issue, end)
        for (tensor, start, end, copy), release, issue in zip(
            swaps, plan.release.tolist(), plan.issue.tolist(), strict=True
        )
    ]
    return assemble(program.with_algorithms(algorithms), transfers, policy, budget_bytes)
