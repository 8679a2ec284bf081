"""Pick the fastest of several schedules that fits the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from overspill.core import Device, Graph, Schedule, Verb
from overspill.simulate import simulate


def moved_bytes(graph: Graph, schedule: Schedule) -> int:
    """Return the bytes that `schedule` moves over the link, both directions added up."""
    moves = (Verb.OFFLOAD, Verb.PREFETCH)
    return sum(graph.tensors[i.target].nbytes for i in schedule.instructions if i.verb in moves)


def fastest(
    graph: Graph, device: Device, seconds: Sequence[float], candidates: Iterable[Schedule], budget_bytes: int | None
) -> Schedule | None:
    """Return the candidate with the shortest simulated step within the budget, or None.

    Of equals it is the one that moves fewer bytes, then the first. If the candidates do not depend on the budget, a
    larger budget is never slower.
    """
    best: tuple[float, int] | None = None
    chosen: Schedule | None = None
    for candidate in candidates:
        timeline = simulate(graph, candidate, device, seconds)
        if budget_bytes is not None and timeline.peak_bytes > budget_bytes:
            continue
        cost = timeline.step_seconds, moved_bytes(graph, candidate)
        if best is None or cost < best:
            best, chosen = cost, candidate
    return None if chosen is None else replace(chosen, budget_bytes=budget_bytes)
