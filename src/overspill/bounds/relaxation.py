"""What a good plan is like: the fluid of a step in which ops run again by turns, a hint at what to do.

A recomputation belongs to a *turn*: one for forward, then one for each gap of its tensor that ends in backward. What
it reads and is gone is recomputed in the same turn, or held on the device for it. That is as plans do it, not as every
schedule must: the proven bound has rules of its own, in `bound.py`. Solved by HiGHS.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from overspill.core import Device
from overspill.planning.step_program import Gap, Program

from .fluid import Fluid, Transfers
from .linear_program import added, minus

NEIGHBOURS = 8
"""How many of the next forced trips are looked at together with one."""
LEAST_SHARE = 0.7
"""Of what a budget leaves beside the least that each step needs, the smallest share for which a hint is asked."""
SAFETY = 1e-6
"""Share of the optimum that is given away, for the solver works to a tolerance."""


@dataclass(frozen=True)
class Relaxed:
    """An optimum of the relaxation: a step of `seconds`.

    `away` is the share of each gap's group that leaves, `recompute` the share of each op that runs again in backward.
    """

    seconds: float
    away: dict[Gap, float]
    recompute: dict[int, float]


Moves = list[tuple[int, int, list[tuple[int, float]]]]
"""Transfers after the first of two steps and before the second: columns, with the time on the link that each takes."""


@dataclass(frozen=True)
class Trip:
    """A gap in which the steps `first` and `last`, and maybe others between, have no room for the tensor.

    It must move after the step `written`, or be recomputed; where it is `held` (a column) for a recomputation, as far as
    it is held.
    """

    gap: Gap
    written: int
    first: int
    last: int
    size: float
    copied: bool
    held: int | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        return self.written, self.first, self.last, self.gap.end


class Relaxation(Fluid):
    """The relaxation of running a program within a budget, to be solved for it and for parts of it.

    With a program that recomputes, it is of what is left to choose.
    """

    least_share: ClassVar[float] = LEAST_SHARE
    held_apart: ClassVar[bool] = False
    """Whether an input that is held for recomputations serves those of one turn only."""
    held_whole: ClassVar[bool] = False
    """Whether such inputs have forced trips as well."""

    def __init__(self, program: Program, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        self.again: dict[tuple[int, int], int] = {}  # (op, turn) -> column, the share that is recomputed
        self.due: dict[tuple[int, int], int] = {}  # the first step before which that may have to be done
        self.latest: dict[tuple[int, int], int] = {}  # the last one
        self.trips: list[Trip] = []
        super().__init__(program, device, budget_bytes, seconds)

    def solve(self, share: float = 1.0) -> Relaxed | None:
        """An optimum, or None where even the relaxation has none; `share` as in a budget that leaves less to spare."""
        if (found := self.optimum(share)) is None:
            return None
        delay, values = found
        away = {
            gap: max((values[c] for c in g.away.values()), default=0.0) / g.size
            for g in self.groups.values() if g.size
            for gap in g.gaps
        }  # fmt: skip
        return Relaxed(
            seconds=self.total * (1.0 + delay * (1 - SAFETY)) * (1 - SAFETY),
            away=away,
            recompute={op: values[column] for (op, turn), column in self.again.items() if turn == 1},
        )

    @property
    def _planned(self) -> bool:
        return any(step.recompute for step in self.program.steps)

    def _least_program(self) -> Program:
        return self.program if self._planned else super()._least_program()

    def _copied_in(self, tensor: int, gaps: Sequence[Gap]) -> dict[Gap, int | None]:  # noqa: ARG002 - of any tensor
        """One copy may serve several gaps: the longest pays for it."""
        return {max(gaps, key=lambda g: (g.wraps, g.end - g.start)): None}

    # -- what runs again

    def _recomputations(self) -> None:
        """A column for every op that may run again to make a tensor which has a gap, and for what it needs for that."""
        self.turn = self._turns()
        if self._planned:
            return  # what to recompute has been chosen
        for gap in self.program.gaps:
            tensor = self.graph.tensors[gap.tensor]
            if tensor.persistent or gap.end - gap.start <= 1:
                continue
            self._due(gap)
        self._hold_inputs()

    def _turns(self) -> dict[Gap, int]:
        """Which recomputation of its tensor one in this gap would be: 0 for any in forward, then 1, 2, … in backward.

        A tensor that is dropped in two gaps of backward is made again twice.
        """
        turns: dict[Gap, int] = {}
        count: dict[int, int] = defaultdict(int)
        for gap in sorted(self.program.gaps, key=lambda g: (g.tensor, g.start)):
            if gap.end >= self.program.end_of_forward:
                count[gap.tensor] += 1
            turns[gap] = count[gap.tensor]
        return turns

    def _due(self, gap: Gap) -> None:
        """Note that a recomputation may have to give the tensor by the end of `gap`, and so its inputs that are gone."""
        pending, turn = [gap.tensor], self.turn[gap]
        while pending:
            made = pending.pop()
            op = self.graph.ops[self.graph.producer[made]]
            if made not in op.recompute_writes:
                continue
            if (op.id, turn) not in self.again:
                self.again[op.id, turn] = self.lp.variable(1.0)
                pending += [t for t in op.recompute_reads if not self.graph.tensors[t].persistent]
            self.due[op.id, turn] = min(self.due.get((op.id, turn), gap.end), gap.end)
            # What is made for another recomputation may be wanted as late as any.
            latest = gap.end if made == gap.tensor else self.program.length
            self.latest[op.id, turn] = max(self.latest.get((op.id, turn), latest), latest)

    def _column(self, tensor: int, turn: int) -> int | None:
        """The column of the recomputation that makes `tensor` in that turn, if there is one."""
        if self.graph.tensors[tensor].persistent:
            return None
        op = self.graph.ops[self.graph.producer[tensor]]
        return self.again.get((op.id, turn)) if tensor in op.recompute_writes else None

    def _remade(self, gap: Gap) -> int | None:
        return self._column(gap.tensor, self.turn[gap])

    def _hold_inputs(self) -> None:
        """What a recomputation reads and nobody wants any more is recomputed as well, or held on the device for it."""
        touches, tensors = self.program.touches, self.graph.tensors
        # What is gone, maybe for each turn apart -> (op, turn) that reads it.
        needed: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for (op, turn), due in self.due.items():
            for read in self.graph.ops[op].recompute_reads:
                if not tensors[read].persistent and touches[read][-1] < due:
                    needed[read, turn if self.held_apart else 0].append((op, turn))
        for (read, _), events in needed.items():
            held = self.lp.variable(1.0)
            gap = Gap(read, touches[read][-1], min(self.due[event] for event in events))
            made = (tensors[t].nbytes for op, _ in events for t in self.graph.ops[op].recompute_writes)
            self.held.append((held, gap, min(tensors[read].nbytes, *made) / self.unit))
            for op, turn in events:
                again = self._column(read, turn)
                terms = [(self.again[op, turn], 1.0), (held, -1.0)]
                self.lp.row(terms if again is None else [*terms, (again, -1.0)], upper=0.0)

    # -- what must be away as a whole

    def _forced(self) -> list[Trip]:
        """Trips that some step demands: beside the least that it needs, the whole tensor has no room."""
        room = self.budget_bytes - self.alone
        trips: list[Trip] = []
        copied: set[int] = set()
        wanted = [(gap, None) for gap in self.gaps if not gap.wraps]
        held = [(gap, column) for column, gap, _ in self.held] if self.held_whole else []
        for gap, column in sorted([*wanted, *held], key=lambda g: (g[0].start, g[0].tensor)):
            nbytes = self.graph.tensors[gap.tensor].nbytes
            away = np.flatnonzero(room[gap.start + 1 : gap.end] < nbytes)
            if not away.size:
                continue
            first, last = gap.start + 1 + int(away[0]), gap.start + 1 + int(away[-1])
            written = self._written_before(gap)
            trips.append(Trip(gap, written, first, last, nbytes / self.unit, gap.tensor not in copied, column))
            if column is None:
                copied.add(gap.tensor)
        return trips

    def _written_before(self, gap: Gap) -> int:
        """The last step up to `gap` that writes its tensor: from its end on, there is something to copy."""
        touches, steps = self.program.touches[gap.tensor], self.program.steps
        return max(
            (p for p in touches if p <= gap.start and gap.tensor in self.program.op(steps[p]).writes), default=gap.start
        )

    def _windows(self) -> Iterable[int]:
        self.trips = self._forced()
        return {p for trip in self.trips for p in trip.positions}

    def _bind_windows(self) -> None:
        """A forced trip has only the steps between its uses and the place that has no room for it to move in."""
        leaving: Moves = []
        coming: Moves = []
        for trip in self.trips:
            self._trip(trip, leaving, coming)
        for moves in [leaving, coming] if self.device.full_duplex else [leaving + coming]:
            moves.sort(key=lambda m: m[:2])
            for i, (start, end, _) in enumerate(moves):
                for other in {end, *(max(end, m[1]) for m in moves[i + 1 : i + 1 + NEIGHBOURS])}:
                    inside = []
                    for a, b, terms in moves[i:]:
                        if a >= other:
                            break
                        if b <= other:
                            inside += terms
                    self.time.at_most(added(inside), start, other, after=True)

    def _trip(self, trip: Trip, leaving: Moves, coming: Moves) -> None:
        """Add the transfers of a trip, which is made as far as its tensor is not recomputed."""
        out, back = self._link_times()
        moved = self._moved(trip, coming)
        coming.append((trip.last, trip.gap.end, [(moved, back * trip.size)]))
        if trip.copied:
            leaving.append((trip.written, trip.first, [(moved, out * trip.size)]))

    def _moved(self, trip: Trip, coming: Moves) -> int:  # noqa: ARG002 - a stricter rule has more to bring
        """The column of the share of a trip that is made over the link."""
        moved = self.lp.variable(1.0 if self.graph.tensors[trip.gap.tensor].movable else 0.0)
        again = self._column(trip.gap.tensor, self.turn[trip.gap])
        self.lp.row([(moved, 1.0), *([(again, 1.0)] if again is not None else [])], lower=1.0)
        return moved

    # -- time

    def _spend(self, busy: Transfers) -> None:
        """Each interval is longer by its slower algorithm and its recomputations."""
        forward = {key: column for key, column in self.again.items() if key[1] == 0}
        backward = {key: column for key, column in self.again.items() if key[1] > 0}
        boundary = self.program.end_of_forward
        late = [k for k in range(len(self.at)) if self._interval(k)[1] > boundary]
        again = [self._made_again(forward, list(range(len(self.at)))), self._made_again(backward, late)]
        for k in range(len(self.at)):
            start, end = self._interval(k)
            spent = [(columns[k], 1.0) for columns in again if k in columns]
            self.time.beyond([*spent, *busy.get(k, ())], start, end)

    def _deadline(self, recomputation: tuple[int, int]) -> int:
        """The step before which an (op, turn) that runs again has done so."""
        return self.latest[recomputation]

    def _made_again(self, events: Mapping[tuple[int, int], int], intervals: Sequence[int]) -> dict[int, int]:
        """For each of `intervals` a column, the time of recomputations in it; each is done before it is due."""
        if not events:
            return {}
        due: Transfers = defaultdict(list)
        for key, column in events.items():
            interval = bisect_left(self.at, self._deadline(key))
            due[min(max(interval, intervals[0]), intervals[-1])].append((column, self.op_seconds[key[0]] / self.total))
        spent: dict[int, int] = {}
        done, wanted = None, None  # recomputed so far, and due so far
        for k in intervals:
            spent[k], now, want = self.lp.variable(), self.lp.variable(), self.lp.variable()
            self.lp.row([(now, 1.0), (spent[k], -1.0), *minus(done)], lower=0.0, upper=0.0)
            falling_due = [(c, -s) for c, s in due.get(k, ())]
            self.lp.row([(want, 1.0), *falling_due, *minus(wanted)], lower=0.0, upper=0.0)
            self.lp.row([(now, 1.0), (want, -1.0)], lower=0.0)
            done, wanted = now, want
        return spent
