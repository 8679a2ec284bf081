"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from overspill.core import Device, Graph, Schedule
from overspill.core.errors import InfeasibleBudget

from .algorithms import memory_optimal
from .assemble import assemble
from .base import Policy, possible_trips
from .candidates import fastest
from .floor import algorithms_within, infeasible
from .lms import LargeModelSupport
from .order import best_order
from .program import Program
from .search import Search
from .superneurons import Superneurons
from .window import Window

NEAR = 1.01
"""Up to this factor of the ops' own time, a plan is measured against one that only moves."""


class Auto(Policy):
    """Relax, round, search: a linear program says what to recompute and what to move, the clock what that costs.

    The relaxation (`relaxation.py`) is solved for the budget and for somewhat less, and rounded at several thresholds.
    Each rounding gives tensors to recompute and trips to make; a greedy choice completes the trips and the slower
    algorithms that the budget still demands; copies start as early as they can, prefetches as late as they cost no
    time, memory permitting (vDNN §III-B gives the reasons). What a transfer exposes shows only on the clock: from the
    best of these, a local search changes what is recomputed, mostly near the tensors that compute waits for, and what
    moves (`search.py`, `changes.py`). The fastest of that and of the papers' policies that come nearest is taken, of equals the one
    that moves less.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        if not graph.whole_step:
            return self._in_order(graph, device, budget_bytes, seconds)
        return best_order(self._in_order, graph, device, budget_bytes, seconds)

    def _in_order(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = Program(graph)
        if budget_bytes is None or program.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        least = program.with_algorithms(memory_optimal(graph))
        if least.live_bytes(possible_trips(least)).max(initial=0) > budget_bytes:
            raise infeasible(least, budget_bytes, self.name)
        program = program.with_algorithms(algorithms_within(program, budget_bytes))
        ours = Search(program, device, budget_bytes, seconds).best()
        schedules = [ours.schedule(self.name), *_rivals(graph, device, budget_bytes, seconds, ours.seconds)]
        best = fastest(graph, device, seconds, schedules, budget_bytes)
        assert best is not None
        return replace(best, policy=self.name)


def _rivals(
    graph: Graph, device: Device, budget_bytes: int, seconds: tuple[float, ...], took: float
) -> Iterator[Schedule]:
    """The schedules of the papers' policies that come nearest to a plan that `took` so many seconds.

    Where hardly anything is lost, that is the one that moves without a stall; else one that recomputes as well; of a
    whole step, those that move all variables. What checkpoints drop is among the starts of the search.
    """
    least = sum(seconds)
    if took <= least * (1 + 1e-9):
        return
    rivals: list[Policy] = [Window() if took <= NEAR * least else Superneurons()]
    if graph.whole_step:  # where parameters and state move too
        rivals = [Window(), LargeModelSupport()]
    for rival in rivals:
        with suppress(InfeasibleBudget):
            yield rival._plan(graph, device, budget_bytes, seconds)
