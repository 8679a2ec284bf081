"""Memory that calls leave to others whose backwards are pending at the same time."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from .concurrent_plans import ALONE, GraphProblem, Room, Settlement, free_memory_for, is_summed
from .other_batches import OtherBatches
from .pending_calls import GraphKey, PendingCalls
from .planned import Planned


class ConcurrentCalls:
    """The kinds of calls that are pending at once, and the Room that each leaves to the others.

    `problems` has the training graphs that are planned.
    """

    def __init__(self) -> None:
        self.pending = PendingCalls()
        self.other_batches = OtherBatches()
        self.problems: dict[GraphKey, GraphProblem[Any]] = {}
        self._keeps: Counter[GraphKey] = Counter()  # bytes kept for backward by the last plan of each kind of call
        self._late: set[GraphKey] = set()  # kinds of calls whose inputs arrive while others are pending
        self._rooms: dict[GraphKey, Room] = {}
        self._settled: tuple[Any, ...] = False, (0, 0), {}

    def __contains__(self, kind: GraphKey) -> bool:
        """Return whether the Room of this kind is settled."""
        return kind in self._rooms

    def room(self, kind: GraphKey, kept_bytes: int) -> Room:
        """Return the Room that a call of `kind` leaves; `kept_bytes` if it is not settled yet."""
        return self._rooms.get(kind, Room(pending_bytes=kept_bytes))

    def plan(self, planned: Planned, problem: GraphProblem[Any]) -> None:
        """Note the plan of a training graph."""
        self.problems[planned.kind] = problem.as_one_of_several()
        self._keeps[planned.kind] = planned.retained_bytes

    def beside(self, kind: GraphKey) -> Counter[GraphKey]:
        """Return the concurrent calls that a call of `kind` must leave memory for.

        These are the settled ones, or otherwise those of other models seen so far. A graph that does not train is never
        settled; calls of its own model count as they were seen.
        """
        seen = self.pending.beside.get(kind, Counter())
        if kind in self:
            return Counter(seen)
        of_others = {k: n for k, n in (seen | self.pending.others(None)).items() if k.part[0] != kind.part[0]}
        return Counter(of_others) if kind in self.problems else seen | Counter(of_others)

    def kept_beside(self, kind: GraphKey, *, by_same_model: bool) -> int:
        """Return the bytes that calls of the same model, or of others, keep for backward when one of `kind` runs."""
        beside = self.beside(kind)
        chosen = (other for other in beside if (other.part[0] == kind.part[0]) is by_same_model)
        return sum(beside[other] * self._keeps[other] for other in chosen)

    def see(self, planned: Planned, args: Sequence[Any], call: weakref.ref[Node] | None) -> Counter[GraphKey] | None:
        """Return the other calls that are pending when a planned graph runs, if its plan did not know them all."""
        beside = self.pending.others(call)
        if beside <= planned.beside:
            return None
        planned.beside |= beside
        if any(isinstance(args[i], Tensor) and args[i] not in self.other_batches for i in planned.given if args):
            self._late.add(planned.kind)
        self.pending.learn(planned.kind, planned.beside)
        return beside if planned.beside.keys() <= self.problems.keys() else None

    def needed_bytes(self, planned: Planned) -> int:
        """Return the peak bytes of a plan with all calls known to be concurrent with it."""
        room, problem = planned.room, self.problems.get(planned.kind)
        sums = is_summed(planned.kind, self.pending.beside)
        needed = free_memory_for(planned.kind, planned.beside, self.problems, self._keeps, sums=sums)
        more = needed.pending_bytes - room.pending_bytes + max(0, needed.loss_bytes - room.loss_bytes)
        if needed.sums and not room.sums and problem is not None:
            more += problem.gradient_bytes
        return planned.least_peak_bytes + more

    def settle(self, live_bytes: Callable[[Settlement], int], aside: tuple[int, int], *, accumulates: bool) -> bool:
        """Settle how many bytes concurrent calls leave to one another; return whether any changed.

        `live_bytes` returns the bytes that they have together, and `aside` has those that ops outside of planned graphs
        keep, and take. Raises InfeasibleBudgetError if they do not fit together.
        """
        known = {kind: others for kind, others in self.pending.beside.items() if others}
        if (accumulates, aside, known) == self._settled:
            return False
        self._settled = accumulates, aside, dict(known)
        for problem in [*self.problems.values()]:
            self._learn_of(problem.with_aside(*aside), accumulates=accumulates)
        self._make_room(live_bytes)
        return True

    def settle_again(
        self, problem: GraphProblem[Any], live_bytes: Callable[[Settlement], int], *, accumulates: bool
    ) -> Room:
        """Return the Room of a call with more concurrent calls than were settled for.

        Raises InfeasibleBudgetError as `settle` does.
        """
        self._learn_of(problem, accumulates=accumulates)
        self._make_room(live_bytes)
        return self._rooms.get(problem.kind, ALONE)

    def _learn_of(self, problem: GraphProblem[Any], *, accumulates: bool) -> None:
        """Keep `problem` with all that was seen of its calls since."""
        around = replace(problem.surroundings, accumulates=accumulates)
        self.problems[problem.kind] = replace(problem, late=problem.kind in self._late, surroundings=around)

    def _make_room(self, live_bytes: Callable[[Settlement], int]) -> None:
        settlement = Settlement(self.problems, self.pending.beside)
        if settlement.kinds:
            self._rooms = settlement.rooms(live_bytes(settlement))
