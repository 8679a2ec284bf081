"""Choose among an op's algorithms, and plan with a fixed choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overspill.core import OF_OPS, Graph, Op, Schedule

Choice = Mapping[int, int]
"""Algorithm number by op id; ops that are not in it take number 0, their fastest."""


def memory_optimal(graph: Graph) -> dict[int, int]:
    """Return the algorithm of least workspace for each op (vDNN §III-C's "(m)"), the faster of equals.

    Only ops with a choice are included.
    """
    return {op.id: least_workspace(op) for op in graph.ops if op.algorithms}


def least_workspace(op: Op) -> int:
    """Return the number of the algorithm of `op` with the least workspace, the faster of equals."""
    return min(range(len(op.algorithms)), key=lambda i: (op.algorithms[i].workspace_bytes, i), default=0)


def fastest_within(op: Op, room_bytes: int) -> int:
    """Return the number of the fastest algorithm with a workspace within `room_bytes`.

    If none fits, it is that of least workspace.
    """
    fitting = (i for i, algorithm in enumerate(op.algorithms) if algorithm.workspace_bytes <= room_bytes)
    return next(fitting, least_workspace(op))


def folded(graph: Graph, choice: Choice) -> Graph:
    """Return `graph` with the algorithms of `choice` as the only ones of their ops."""
    ops = (
        replace(op, workspace_bytes=op.workspace_of(choice[op.id]), algorithms=()) if op.id in choice else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def folded_seconds(graph: Graph, choice: Choice, seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of each op of `folded(graph, choice)`, given `seconds` with the fastest algorithms."""
    return tuple(s * graph.ops[i].slowdown_of(choice.get(i, 0)) for i, s in enumerate(seconds))


def unfolded(schedule: Schedule, choice: Choice) -> Schedule:
    """Return the schedule of a folded graph, for the graph itself."""
    instructions = (
        replace(i, algorithm=choice[i.target]) if i.verb in OF_OPS and i.target in choice else i
        for i in schedule.instructions
    )
    return replace(schedule, instructions=tuple(instructions))
