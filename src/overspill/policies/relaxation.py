"""A linear relaxation of planning under a budget: a lower bound on the step, and a hint at what to do.

Time is cut at *markers*, steps at which memory is looked at; elsewhere it may be exceeded. Tensors whose gaps cover
the same markers are one *group*, of which any part may be away. The variables say how much of each group is away at
each marker, how much moves between two markers, and how much of each op is recomputed; the step is as short as the
link in each direction, the budget at each marker, and the ops allow. Every schedule that keeps the graph's order, makes
again in backward what backward reads, and can be carried out as two graphs, forward and backward, is a solution of
this program with its own time or less: so its optimum is a lower bound, which
`tests/policies/test_relaxation.py` holds against the schedules of every policy on random steps. Solved by HiGHS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph

from .algorithms import memory_optimal
from .linear import INFINITY, LinearProgram, added, minus
from .program import Gap, Positions, Program

MARKERS = 40
NEIGHBOURS = 8
"""How many of the next forced trips are looked at together with one."""
LEAST_SHARE = 0.7
"""Of what a budget leaves beside the least that each step needs, the smallest share for which a hint is asked."""
SAFETY = 1e-6
"""Share of the optimum that is given away, for the solver works to a tolerance."""


@dataclass(frozen=True)
class Relaxed:
    """An optimum of the relaxation: no schedule takes less than `seconds`.

    `away` is the share of each gap's group that leaves, `recompute` the share of each op that runs again in backward.
    """

    seconds: float
    away: dict[Gap, float]
    recompute: dict[int, float]


def lower_bound_seconds(graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> float:
    """A step time that no schedule in the graph's order beats within the budget; the ops' own time at the least."""
    program = Program(graph)
    if program.live_bytes().max(initial=0) <= budget_bytes:
        return sum(seconds)
    relaxed = Relaxation(program, device, budget_bytes, seconds).solve()
    return sum(seconds) if relaxed is None else max(sum(seconds), relaxed.seconds)


Moves = list[tuple[int, int, list[tuple[int, float]]]]
"""Transfers after the first of two steps and before the second: columns, with the time on the link that each takes."""
_Transfers = dict[int, list[tuple[int, float]]]
"""For each interval, by the marker that begins it, columns with coefficients; -1 is the time before the step."""


@dataclass
class _Group:
    """Gaps that cover the same markers: `markers` in the order of time, those before the end of the step first."""

    markers: tuple[int, ...]
    leaves_in_forward: bool
    returns_in_backward: bool
    copied: bool
    wraps: bool
    gaps: list[Gap] = field(default_factory=list)
    held: list[tuple[int, float]] = field(default_factory=list)  # (column, size) of inputs kept for recomputation
    size: float = 0.0
    most: int = -1
    away: dict[int, int] = field(default_factory=dict)  # marker -> column


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


class _Time:
    """When steps start: after the ops before them, and a delay, a column for each of `positions` and the step's end."""

    def __init__(self, lp: LinearProgram, durations: NDArray[np.float64], positions: set[int]) -> None:
        self.lp = lp
        self.clock = np.concatenate([[0.0], np.cumsum(durations)])
        self.delay: dict[int, int] = {}
        previous = None
        for position in sorted({0, *positions, len(durations)}):
            column = self.delay[position] = lp.variable(cost=1.0 if position == len(durations) else 0.0)
            if previous is not None:
                lp.row([(column, 1.0), (previous, -1.0)], lower=0.0)
            previous = column

    def at_most(self, terms: Sequence[tuple[int, float]], start: int, end: int, *, after: bool = False) -> None:
        """The sum of `terms` takes no longer than from the start of step `start`, or its end, to the start of `end`."""
        ops = self._span(start + 1 if after else start, end)
        if sum(value * self.lp.upper[column] for column, value in terms) > ops:
            self.lp.row([*terms, *self._delay(start, end)], upper=ops)

    def beyond(self, terms: Sequence[tuple[int, float]], start: int, end: int) -> None:
        """The sum of `terms` is spent between the two steps, beside the ops there."""
        self.lp.row([*terms, *self._delay(start, end)], upper=0.0)

    def _delay(self, start: int, end: int) -> list[tuple[int, float]]:
        """Minus the delay between two steps; a start of -1 is before the first."""
        return [(self.delay[end], -1.0), *([(self.delay[start], 1.0)] if start >= 0 else [])]

    def _span(self, start: int, end: int) -> float:
        return float(self.clock[end] - self.clock[start]) if start >= 0 else 0.0


class Relaxation:
    """The relaxation of running a program within a budget, to be solved for it and for parts of it.

    Sizes are in shares of the budget, times in shares of the ops' whole time, so that numbers are near one. With a
    program that recomputes, the bound is on what is left to choose.
    """

    held_apart: ClassVar[bool] = False
    """Whether an input that is held for recomputations serves those of one turn only."""
    held_whole: ClassVar[bool] = False
    """Whether such inputs have forced trips as well."""

    def __init__(self, program: Program, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        self.program = program
        self.graph = program.graph
        self.device = device
        self.lp = LinearProgram()
        self.durations = program.durations(seconds)
        self.op_seconds = seconds
        self.total = float(self.durations.sum()) or 1.0
        self.unit = float(max(1, budget_bytes))
        self.live = program.live_bytes()
        self.budget_bytes = budget_bytes
        self.gaps = [gap for gap in program.gaps if self._may_be_away(gap)]
        least = program if self._planned else Program(self.graph, algorithms=memory_optimal(self.graph))
        self.alone = least.live_bytes(self.gaps)
        self.over = self.live > self._limits(LEAST_SHARE)
        self.at = self._markers(MARKERS)
        self.groups: dict[tuple[object, ...], _Group] = {}
        self.again: dict[tuple[int, int], int] = {}  # (op, turn) -> column, the share that is recomputed
        self.due: dict[tuple[int, int], int] = {}  # the first step before which that may have to be done
        self.latest: dict[tuple[int, int], int] = {}  # the last one
        self.turn = self._turns()
        self.held: list[tuple[int, Gap, float]] = []  # columns of inputs kept for recomputations, and the smallest size
        self.wanted: dict[int, tuple[int, float]] = {}  # marker -> row of its memory, and what it is wanted beside
        self._build()

    def _may_be_away(self, gap: Gap) -> bool:
        """Whether a tensor may be away in a gap, however small it is: because it moves, or because it is made again."""
        tensor = self.graph.tensors[gap.tensor]
        if gap.remade or not (gap.wraps or gap.end - gap.start > 1):
            return False
        return tensor.movable or (
            not tensor.persistent and tensor.id in self.graph.ops[self.graph.producer[tensor.id]].recompute_writes
        )

    def _limits(self, share: float) -> Positions:
        """What each step may have on the device: its least, and a share of what the budget leaves beside that."""
        limits: Positions = np.maximum(self.alone, self.alone + share * (self.budget_bytes - self.alone)).astype(
            np.int64
        )
        return limits

    def _build(self) -> None:
        self._recomputable()
        self._hold_inputs()
        forced = self._forced()
        positions = {*self.at, *(p for trip in forced for p in trip.positions)}
        self.time = _Time(self.lp, self.durations / self.total, positions)
        self._windows(forced)
        self._make_groups()
        leaving: _Transfers = defaultdict(list)
        coming: _Transfers = defaultdict(list)
        for group in self.groups.values():
            self._flow(group, leaving, coming)
        self._links(leaving, coming)
        busy: _Transfers = defaultdict(list)
        for k, p in enumerate(self.at):
            if self.over[p]:
                self._memory(k, p, busy)
        self._spend(busy)

    def solve(self, share: float = 1.0) -> Relaxed | None:
        """An optimum, or None where even the relaxation has none; `share` as in a budget that leaves less to spare."""
        limits = self._limits(share)
        for k, (row, beside) in self.wanted.items():
            p = self.at[k]
            self.lp.at_least(row, (self.live[p] - limits[p]) / self.unit - beside)
        found = self.lp.solve()
        if found is None:
            return None
        optimum, values = found
        away = {
            gap: max((values[c] for c in g.away.values()), default=0.0) / g.size
            for g in self.groups.values() if g.size
            for gap in g.gaps
        }  # fmt: skip
        return Relaxed(
            seconds=self.total * (1.0 + optimum * (1 - SAFETY)) * (1 - SAFETY),
            away=away,
            recompute={op: values[column] for (op, turn), column in self.again.items() if turn == 1},
        )

    @property
    def _planned(self) -> bool:
        return any(step.recompute for step in self.program.steps)

    def _markers(self, count: int) -> list[int]:
        """Positions in order: in each of `count` equal spans of time the one with most bytes, and where forward ends."""
        length = self.program.length
        ends = np.cumsum(self.durations)
        slot = np.minimum((ends - self.durations / 2) / self.total * count, count - 1).astype(int)
        chosen = {0, min(self.program.end_of_forward, length - 1)}
        for s in np.unique(slot):
            inside = np.flatnonzero(slot == s)
            chosen.add(int(inside[np.argmax(self.live[inside])]))
        if length:
            chosen.add(int(np.argmax(self.live)))
        return sorted(chosen)

    # -- what may be away

    def _covered(self, start: int, end: int, *, wraps: bool) -> tuple[int, ...]:
        first, last = np.searchsorted(self.at, start, side="right"), np.searchsorted(self.at, end, side="left")
        if wraps:
            return (*range(first, len(self.at)), *range(last))
        return tuple(range(first, last))

    def _group(self, gap: Gap, *, copied: bool) -> _Group | None:
        markers = self._covered(gap.start, gap.end, wraps=gap.wraps)
        if not any(self.over[self.at[k]] for k in markers):
            return None
        boundary = self.program.end_of_forward
        apart = not (gap.wraps or self.graph.whole_step)  # forward and backward are two graphs
        leaves, returns = apart and gap.start < boundary, apart and gap.end >= boundary
        key = (markers, leaves, returns, copied, gap.wraps)
        return self.groups.setdefault(key, _Group(markers, leaves, returns, copied, gap.wraps))

    def _make_groups(self) -> None:
        tensors = self.graph.tensors
        by_tensor: dict[int, list[Gap]] = defaultdict(list)
        for gap in self.gaps:
            by_tensor[gap.tensor].append(gap)
        for tensor, gaps in by_tensor.items():
            # One copy may serve several gaps: the longest pays for it.
            longest = max(gaps, key=lambda g: (g.wraps, g.end - g.start))
            for gap in gaps:
                if (group := self._group(gap, copied=gap is longest)) is not None:
                    group.gaps.append(gap)
                    group.size += tensors[tensor].nbytes / self.unit
        for held, gap, size in self.held:
            if (group := self._group(gap, copied=True)) is not None:
                group.held.append((held, size))
        for group in self.groups.values():
            self._limit(group)

    def _recomputable(self) -> None:
        """A column for every op that may run again to make a tensor which has a gap, and for what it needs for that."""
        if self._planned:
            return  # what to recompute has been chosen
        for gap in self.program.gaps:
            tensor = self.graph.tensors[gap.tensor]
            if tensor.persistent or gap.end - gap.start <= 1:
                continue
            self._due(gap)

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

    def _limit(self, group: _Group) -> None:
        """What of a group may leave over the link: all but what is recomputed, and what is held for recomputations."""
        terms = []
        for gap in group.gaps:
            again = self._column(gap.tensor, self.turn[gap])
            if again is not None:
                terms.append((again, self.graph.tensors[gap.tensor].nbytes / self.unit))
        if terms or group.held:
            group.most = self.lp.variable()
            held = [(column, -size) for column, size in group.held]
            self.lp.row([(group.most, 1.0), *added(terms), *held], lower=group.size, upper=group.size)

    # -- how it moves

    def _flow(self, group: _Group, leaving: _Transfers, coming: _Transfers) -> None:
        """Bytes away at each marker: what was away before, more what left, less what came back in between."""
        lp, boundary = self.lp, self.program.end_of_forward
        at_home = lp.variable(group.size) if group.wraps else None
        previous: list[tuple[int, float]] = []
        for index, k in enumerate(group.markers):
            begins_step = at_home is not None and k == 0
            if at_home is not None and begins_step:
                if previous:  # from the last marker to the end of the step
                    self._step(previous, at_home, leaving[len(self.at) - 1], None, group)
                previous = [(at_home, 1.0)]
            away = lp.variable(INFINITY if group.most >= 0 else group.size)
            group.away[k] = away
            if group.most >= 0:
                lp.row([(away, 1.0), (group.most, -1.0)], upper=0.0)
            interval = k - 1
            may_leave = not group.leaves_in_forward or k == 0 or self.at[k - 1] < boundary
            may_come = not group.returns_in_backward or self.at[k] > boundary
            inward = coming[interval] if previous and may_come else None
            self._step(previous, away, leaving[interval] if may_leave and not begins_step else None, inward, group)
            previous = [(away, 1.0)]
            if index + 1 == len(group.markers):
                if at_home is not None and 0 not in group.markers:
                    self._step(previous, at_home, leaving[len(self.at) - 1], None, group)
                    coming[-1].append((at_home, 1.0))
                else:
                    coming[k].append((away, 1.0))

    def _step(
        self,
        previous: list[tuple[int, float]],
        away: int,
        leaving: list[tuple[int, float]] | None,
        coming: list[tuple[int, float]] | None,
        group: _Group,
    ) -> None:
        terms = [(away, 1.0), *((c, -v) for c, v in previous)]
        if leaving is not None:
            out = self.lp.variable()
            terms.append((out, -1.0))
            if group.copied:
                leaving.append((out, 1.0))
        if coming is not None:
            back = self.lp.variable()
            terms.append((back, 1.0))
            coming.append((back, 1.0))
        self.lp.row(terms, lower=0.0, upper=0.0)

    def _links(self, leaving: _Transfers, coming: _Transfers) -> None:
        """In each interval, each direction of the link moves what its rate allows; one that is half duplex, both."""
        out, back = self._link_times()
        for k in range(-1, len(self.at)):
            outward = [(c, out * v) for c, v in leaving.get(k, ())]
            inward = [(c, back * v) for c, v in coming.get(k, ())]
            both = [outward, inward] if self.device.full_duplex else [outward + inward]
            for moved in both:
                if moved:
                    start, end = self._interval(k)
                    self.time.at_most(added(moved), start, end)

    def _link_times(self) -> tuple[float, float]:
        """Time that the budget's size takes on the link, each way."""
        device = self.device
        return (
            self.unit / device.offload_bytes_per_second / self.total,
            self.unit / device.prefetch_bytes_per_second / self.total,
        )

    def _interval(self, k: int) -> tuple[int, int]:
        """The steps from marker `k` to the next; -1 is the time before the first step."""
        if k < 0:
            return -1, 0
        return self.at[k], self.at[k + 1] if k + 1 < len(self.at) else self.program.length

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

    def _windows(self, trips: Sequence[Trip]) -> None:
        """A forced trip has only the steps between its uses and the place that has no room for it to move in."""
        leaving: Moves = []
        coming: Moves = []
        for trip in trips:
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

    # -- budget and time

    def _memory(self, k: int, p: int, busy: _Transfers) -> None:
        """At a marker, what is away and what a smaller workspace saves make up for what is over the budget."""
        terms: list[tuple[int, float]] = []
        constant = 0.0
        for group in self.groups.values():
            if k in group.away:
                terms.append((group.away[k], 1.0))
                if group.most >= 0:  # recomputed: size - most
                    terms.append((group.most, -1.0))
                    constant += group.size
        op, chosen = self.program.op(self.program.steps[p]), self.program.algorithm(self.program.steps[p])
        others = []
        for algorithm in op.algorithms:
            saved = op.workspace_of(chosen) - algorithm.workspace_bytes
            lost = self.op_seconds[op.id] * (algorithm.slowdown - op.slowdown_of(chosen)) / self.total
            if saved > 0:
                column = self.lp.variable(1.0)
                others.append(column)
                terms.append((column, saved / self.unit))
                busy[k].append((column, max(0.0, lost)))
        if others:
            self.lp.row([(c, 1.0) for c in others], upper=1.0)
        self.wanted[k] = self.lp.row(terms), constant

    def _spend(self, busy: _Transfers) -> None:
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
        due: _Transfers = defaultdict(list)
        for key, column in events.items():
            interval = int(np.searchsorted(self.at, self._deadline(key), side="left"))
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
