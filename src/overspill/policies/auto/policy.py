"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import floor, log, sqrt
from typing import ClassVar

from overspill.core import Device, Graph, Schedule
from overspill.core.errors import InfeasibleBudget
from overspill.planning.algorithms import memory_optimal
from overspill.planning.assemble import assemble
from overspill.planning.fastest import fastest
from overspill.planning.floor import infeasible
from overspill.planning.gaps import may_move, possible_trips
from overspill.planning.order import best_order
from overspill.planning.step_program import Program
from overspill.policies.base import Policy
from overspill.policies.lms import LargeModelSupport
from overspill.policies.superneurons import Superneurons
from overspill.policies.window import Window

from .search import GOOD_ENOUGH, Attempt, Ground, Search

NEAR = 1.01
"""Up to this factor of the ops' own time, a plan is measured against one that only moves."""
FEW_OPS = 48
"""A step of no more ops is planned for all budgets and links that matter, so that none is slower than one that has less."""
LINK_FACTOR = 4
"""How much faster than the one before each of these links is."""
PATIENCE = 5
"""How many times as long as the search of `auto` that of `auto:thorough` may take."""


class Auto(Policy):
    """Relax, round, search: a linear program says what to recompute and what to move, the clock what that costs.

    The relaxation (`relaxation.py`) is solved for the budget and for somewhat less, and rounded at several thresholds.
    Each rounding gives tensors to recompute and trips to make; a greedy choice completes the trips and the slower
    algorithms that the budget still demands; copies start as early as they can, prefetches as late as they cost no
    time, memory permitting (vDNN §III-B gives the reasons). What a transfer exposes shows only on the clock: from the
    best of these, a local search changes what is recomputed, mostly near the tensors that compute waits for, and what
    moves (`search.py`, `walk.py`). The fastest of that and of the papers' policies that come nearest is taken, of
    equals the one that moves less.

    A search within one budget may miss what it finds within a smaller one, and one for a fast link what it finds for a
    slow one. Where ops are few, none is for the sake of the budget or the link that there are: the first search is within
    one byte less than the step takes unmanaged, each next within one byte less than the plan before it takes, down to
    the floor, and all of them for a ladder of links up to the next above the device's own. Whatever the budget and the
    link, the plan is the one of these that fits and is the fastest with that link.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True
    patience: ClassVar[int] = 0
    """How many times as long as the usual search goes on from the best plan that it found."""

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        if not graph.whole_step:
            return self._in_order(graph, device, budget_bytes, seconds)
        return best_order(self._in_order, graph, device, budget_bytes, seconds)

    def _in_order(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = Program(graph)
        if budget_bytes is None or program.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        least = program.with_algorithms(memory_optimal(graph))
        least_bytes = int(least.live_bytes(possible_trips(least)).max(initial=0))
        if least_bytes > budget_bytes:
            raise infeasible(least, budget_bytes, self.name)
        if graph.whole_step or len(graph.ops) > FEW_OPS:
            ours = Search(Ground(program, seconds), device, budget_bytes, patience=self.patience).best()
            rivals = _nearest(graph, ours.seconds, sum(seconds))
        else:
            ground = Ground(program, seconds)
            found = (a for link in _links(ground, device) for a in _of_all_peaks(ground, link, least_bytes))
            fitting = (attempt for attempt in found if attempt.peak_bytes <= budget_bytes)
            ours = min(fitting, key=lambda attempt: attempt.cost_on(device))
            rivals = [Window(), Superneurons()]
        schedules = [ours.schedule(self.name)]
        for rival in rivals:
            with suppress(InfeasibleBudget):
                schedules.append(rival._plan(graph, device, budget_bytes, seconds))
        best = fastest(graph, device, seconds, schedules, budget_bytes)
        assert best is not None
        return replace(best, policy=self.name)


class ThoroughAuto(Auto):
    """`auto` with a search that takes five times as long or more, and gives a plan that is never slower.

    A step of few ops is planned as `auto` plans it, for all its peaks.
    """

    name = "auto:thorough"
    summary = "auto with five times the search: seconds more to plan, for steps that are faster where memory is tight"
    patience = PATIENCE


def _links(ground: Ground, device: Device) -> Iterator[Device]:
    """The device with each link that matters to the step, as fast one way as the other, up to the next above its own.

    Which rates there are depends on the step alone, so what is planned for a link is planned for every faster one too.
    The slowest moves one tensor while all ops run, the fastest all tensors in a time that is not worth an attempt.
    """
    sizes = [t.nbytes for t in ground.graph.tensors if may_move(t)] or [1]
    longest = sum(ground.seconds) or 1.0
    own = sqrt(device.offload_bytes_per_second * device.prefetch_bytes_per_second)
    slowest = floor(log(min(sizes) / longest, LINK_FACTOR))
    quickest = log(sum(sizes) / ((GOOD_ENOUGH - 1.0) * longest), LINK_FACTOR)
    next_above = floor(min(log(own, LINK_FACTOR), quickest)) + 1
    for power in range(slowest, max(slowest, next_above) + 1):
        rate = float(LINK_FACTOR) ** power
        yield replace(device, offload_bytes_per_second=rate, prefetch_bytes_per_second=rate)


def _of_all_peaks(ground: Ground, device: Device, least_bytes: int) -> Iterator[Attempt]:
    """Plans of ever smaller peaks, from one within less than the step takes to one of the least bytes."""
    budget_bytes = int(ground.program.live_bytes().max()) - 1
    while budget_bytes >= least_bytes:
        found = Search(ground, device, budget_bytes, brief=True).best()
        yield found
        budget_bytes = found.peak_bytes - 1


def _nearest(graph: Graph, took: float, least: float) -> list[Policy]:
    """The papers' policies that come nearest to a plan that `took` so many seconds, where the ops take `least`.

    Where hardly anything is lost, that is the one that moves without a stall; else one that recomputes as well; of a
    whole step, those that move all variables. What checkpoints drop is among the starts of the search.
    """
    if took <= least * (1 + 1e-9):
        return []
    if graph.whole_step:  # where parameters and state move too
        return [Window(), LargeModelSupport()]
    return [Window() if took <= NEAR * least else Superneurons()]
