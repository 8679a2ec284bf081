"""`auto`: keep, offload or recompute each tensor, for the fastest step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from overspill.core import Device, Graph, Phase, Schedule
from overspill.planning.algorithms import memory_optimal
from overspill.planning.assemble import assemble
from overspill.planning.effort import EFFORT, Effort
from overspill.planning.floor import infeasible
from overspill.planning.gaps import swappable_gaps
from overspill.planning.on_host import updates_of
from overspill.planning.order import best_order
from overspill.planning.step_program import StepProgram
from overspill.policies.base import Policy
from overspill.policies.parameters import choice

from .host_updates import DEVICE, UPDATES, Ways
from .search import BestPlan, Search

SHARE_OF_AN_ORDER = 0.5
"""A whole step is planned in two orders, each with this share of the effort.

A third plan, of feature maps alone, has all of it: so it is no slower than that plan of the step in two graphs.
"""


def _is_to_update(graph: Graph) -> bool:
    """Return whether updates are planned: not in a micro-batch before the last, nor in a loop whose weights stay."""
    return bool(updates_of(graph)) or (graph.whole_step and any(op.phase is Phase.UPDATE for op in graph.ops))


class Auto(Policy):
    """Simulated annealing over recomputed tensors, with a list scheduler that plans each choice.

    The annealing (`search.py`) changes which saved tensors are recomputed, mostly near ops that compute waits for. For
    each choice a greedy scheduler takes the swaps and slower algorithms that the budget still demands. It takes the
    cheapest per byte and second relieved first. Copies start as early as they can, prefetches as late as they cost no
    time, if memory permits (vDNN §III-B gives the reasons). Exposed transfer time shows only on the simulated clock.
    The fastest plan wins; of equals, the one that moves less.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True
    in_pieces = True
    placement = "planned"
    parameters = (choice("update", "update", "where weights are updated", UPDATES, DEVICE),)

    def __init__(self, *, memory_optimal: bool = False, effort: Effort | None = None, update: str = DEVICE) -> None:
        """Set how long to search by `effort` (None for the default), and where updates of a whole step run."""
        super().__init__(memory_optimal=memory_optimal)
        self.update = update
        self.effort = Effort.usual() if effort is None else effort

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        update = self.update if _is_to_update(graph) else DEVICE
        if update == DEVICE and not (device.host_bytes and budget_bytes):
            return self._on_device(graph, device, budget_bytes, seconds)
        return Ways(self._on_device, graph, device, budget_bytes, seconds).best(update)

    def _on_device(
        self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]
    ) -> Schedule:
        found: list[BestPlan] = []
        if graph.whole_step:
            return best_order(partial(self._in_order, found), graph, device, budget_bytes, seconds)
        made = self._in_order(found, graph, device, budget_bytes, seconds)
        assert made is not None
        return made

    def _in_order(
        self, found: list[BestPlan], graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]
    ) -> Schedule | None:
        """Return the best plan, next to those `found` in other orders; None if it is far from the best of them."""
        program = StepProgram(graph)
        if budget_bytes is None or program.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        # The least memory: all that can leave has left, and every op takes its smallest workspace.
        least = program.with_algorithms(memory_optimal(graph))
        if least.live_bytes(swappable_gaps(least)).max(initial=0) > budget_bytes:
            raise infeasible(least, budget_bytes, self.name)
        effort = self.effort.scaled(EFFORT.get() * (SHARE_OF_AN_ORDER if graph.whole_step else 1))
        search = Search(program, seconds, device, budget_bytes, effort)
        if search.is_far(found):
            return None
        found.append(search.best())
        return replace(found[-1].schedule(self.name), budget_bytes=budget_bytes)
