"""How far apart ops are in the graph: the distance that LMS measures, on topological levels."""

from __future__ import annotations

from overspill.core import Graph


def levels(graph: Graph) -> tuple[int, ...]:
    """For each op, the number of ops on the longest chain that it must wait for: its level in topological order.

    An op waits for the last writer of what it reads, and where it writes also for those who have used that before.
    """
    found: list[int] = []
    ready: dict[int, int] = {}  # tensor -> the level from which it may be read
    idle: dict[int, int] = {}  # tensor -> the level from which it may be written
    for op in graph.ops:
        level = max([0, *(ready.get(t, 0) for t in op.reads), *(idle.get(t, 0) for t in op.writes)])
        for tensor in (*op.reads, *op.writes):
            idle[tensor] = max(idle.get(tensor, 0), level + 1)
        for tensor in op.writes:
            ready[tensor] = level + 1
        found.append(level)
    return tuple(found)
