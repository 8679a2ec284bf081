"""The linear relaxation of a step: any part of a tensor may be offloaded.

Memory is considered at *sample points*, some of the steps; at others it may exceed the budget. Tensors whose gaps cover
the same sample points are one *group*, of which any part may be away. Columns of a linear program say how much of each
group is away at each sample point, and how much moves between two of them. They also say how much later each step
starts than without waits. Recomputations are columns of `recomputations.py`; `step_time.py` makes a bound of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device
from overspill.planning.algorithms import memory_optimal
from overspill.planning.linear_program import INFINITY, LinearProgram, Terms, added, minus
from overspill.planning.step_program import Gap, StepProgram

from .recomputations import Recomputations

SAMPLE_POINTS = 40
"""Number of steps, about equally far apart in time, at which memory is considered."""
NEGLIGIBLE = 1e-3
"""Tensors that take at most this share of the budget in sum may be away at no cost."""
Transfers = dict[int, Terms]
"""Terms by interval: the sample point at its start, or -1 for the time before the step."""


@dataclass
class GapGroup:
    """Gaps that cover the same sample points."""

    points: tuple[int, ...]
    """The sample points, those before the step's end first."""
    copied: bool
    """Whether the copy to the store is paid for here."""
    wraps: bool
    begins: int
    """The interval in which the gaps begin."""
    since: int
    """The interval from which on the copy is paid for."""
    gaps: list[Gap] = field(default_factory=list)
    held: Terms = field(default_factory=list)
    """(column, size) of inputs kept for recomputations."""
    size: float = 0.0
    most: int = -1
    """The column of the bytes that may leave over the link."""
    away: dict[int, int] = field(default_factory=dict)  # sample point -> column


class Time:
    """Start times of steps: the ops before them plus a delay column.

    Each of `positions` has a column, and the step's end.
    """

    def __init__(self, lp: LinearProgram, durations: NDArray[np.float64], positions: Collection[int]) -> None:
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
        """Require that `terms` fit between the starts of two steps; with `after`, from the end of step `start` on."""
        ops = self._span(max(0, start + 1 if after else start), end)
        if sum(value * self.lp.upper[column] for column, value in terms) > ops:
            self.lp.row([*terms, *self._delay(start, end)], upper=ops)

    def beyond(self, terms: Sequence[tuple[int, float]], start: int, end: int) -> None:
        """Require extra time for `terms` between the two steps, on top of the ops."""
        self.lp.row([*terms, *self._delay(start, end)], upper=0.0)

    def _delay(self, start: int, end: int) -> Terms:
        """Return minus the delay between two steps; a start of -1 is before the first."""
        return [(self.delay[end], -1.0), *([(self.delay[start], 1.0)] if start >= 0 else [])]

    def _span(self, start: int, end: int) -> float:
        return float(self.clock[end] - self.clock[start])


class Relaxation(ABC):
    """The relaxation of running `program` on `device` within `budget_bytes`.

    The program recomputes nothing itself. `seconds[i]` is the time of op `i` with its fastest algorithm. In the linear
    program, sizes are shares of the budget and times shares of the ops' whole time, so that numbers are near one.
    """

    def __init__(self, program: StepProgram, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        self.program = program
        self.graph = program.graph
        self.device = device
        self.budget_bytes = budget_bytes
        self.op_seconds = seconds
        self.durations = program.durations(seconds)
        self.total = float(self.durations.sum()) or 1.0
        self.unit = float(max(1, budget_bytes))
        self.lp = LinearProgram()
        self.recomputations = Recomputations(program, self.lp, self.unit)

        self.negligible = self._smallest_tensors(NEGLIGIBLE * self.unit)
        # Gaps in which tensors may be away, each step's bytes with none away, and with all of them.
        dropped = [gap for gap in program.gaps if self._may_be_dropped(gap)]
        never_there = self._never_there_bytes()
        self.gaps = [gap for gap in program.gaps if self._may_be_away(gap)]
        self.live = program.live_bytes(dropped) - never_there + self._visiting_bytes()
        least = StepProgram(self.graph, algorithms=memory_optimal(self.graph))
        self.alone = least.live_bytes([*self.gaps, *dropped]) - never_there
        self.limits = np.maximum(self.alone, budget_bytes)
        self.over = self.live > self.limits

        self.at = self._sample_points(SAMPLE_POINTS)
        self.groups: dict[tuple[object, ...], GapGroup] = {}
        self.whole: set[Gap] = set()  # gaps whose tensors count as away only as a whole
        self.choices: list[int] = []  # columns of algorithms, which are 0 or 1
        self.absent: list[int] = []  # columns of such tensors at a sample point
        self._build()

    @abstractmethod
    def _positions(self) -> Iterable[int]:
        """Decide which tensors count only as a whole, and return further steps whose start is a column."""

    @abstractmethod
    def _force_transfers(self) -> None:
        """Add rows for the transfers that single steps force, once those columns exist."""

    @abstractmethod
    def _spend(self, busy: Transfers) -> None:
        """Lengthen each interval by its recomputations and slower algorithms (`busy`)."""

    def _build(self) -> None:
        self.recomputations.build(self.gaps)
        self.time = Time(self.lp, self.durations / self.total, {*self.at, *self._positions()})
        self._force_transfers()
        self._make_groups()
        leaving: Transfers = defaultdict(list)
        coming: Transfers = defaultdict(list)
        for group in self.groups.values():
            self._flow(group, leaving, coming)
        busy: Transfers = defaultdict(list)
        away = self._visit(leaving, coming, busy)
        self._links(leaving, coming)
        for k, p in enumerate(self.at):
            if self.over[p]:
                self._memory(k, p, busy, away.get(k, []))
        self._spend(busy)

    def _visiting_bytes(self) -> int:
        """Return the bytes of tensors outside the program that may all be away (`_visit`)."""
        return 0

    def _visit(self, leaving: Transfers, coming: Transfers, busy: Transfers) -> Transfers:  # noqa: ARG002
        """Add the transfers and ops' times of such tensors; return the terms of their bytes away, by sample point."""
        return {}

    # -- gaps

    def _may_be_away(self, gap: Gap) -> bool:
        """Return whether a tensor of any size may be away in a gap, by a swap or by recomputation."""
        if self._may_be_dropped(gap) or not (gap.wraps or gap.end - gap.start > 1):
            return False
        return self.graph.tensors[gap.tensor].movable or self.recomputations.maker(gap.tensor, gap.start) is not None

    def _may_be_dropped(self, gap: Gap) -> bool:
        """Return whether a gap ends where the tensor is overwritten unread, or it is too small to matter."""
        if gap.tensor in self.negligible:
            return True
        return gap.end < self.program.length and gap.tensor not in self.program.op(self.program.steps[gap.end]).reads

    def _smallest_tensors(self, nbytes: float) -> set[int]:
        """Return the smallest tensors that take at most `nbytes` together."""
        found: set[int] = set()
        for tensor in sorted(self.graph.tensors, key=lambda t: t.nbytes):
            nbytes -= tensor.nbytes
            if nbytes < 0:
                break
            found.add(tensor.id)
        return found

    def stays(self, gap: Gap) -> bool:
        """Return whether a tensor must stay in a gap: adjacent steps, or not movable."""
        return not (
            self._may_be_away(gap)
            or self._may_be_dropped(gap)
            or self.recomputations.maker(gap.tensor, gap.start) is not None
        )

    def _never_there_bytes(self) -> int:
        """Return the bytes of tensors that are never used and may stay in the store for good."""
        touches = self.program.touches
        return sum(t.nbytes for t in self.graph.tensors if t.persistent and t.movable and not touches[t.id])

    def _copied_in(self, tensor: int, gaps: Sequence[Gap]) -> dict[Gap, int]:
        """Return the gaps that pay for the copy to the store, with the step after which it may begin.

        Of the gaps between two writes the longest pays; values from before the step may have a copy already.
        """
        written = self.program.written[tensor]
        found: dict[int, Gap] = {}
        for gap in sorted(gaps, key=lambda g: (g.wraps, g.end - g.start)):
            if writes := bisect_right(written, gap.start):
                found[writes] = gap
        return {gap: written[writes - 1] for writes, gap in found.items()}

    # -- sample points

    def _sample_points(self, count: int) -> list[int]:
        """Return the positions with most bytes in each of `count` equal spans of time, and forward's end."""
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

    def _interval(self, k: int) -> tuple[int, int]:
        """Return the steps from sample point `k` to the next; -1 is the time before the first step."""
        if k < 0:
            return -1, 0
        return self.at[k], self.at[k + 1] if k + 1 < len(self.at) else self.program.length

    def _interval_of(self, step: int) -> int:
        """Return the interval that `step` is in."""
        return bisect_right(self.at, step) - 1

    # -- groups of gaps

    def _covered(self, gap: Gap) -> tuple[int, ...]:
        first, last = bisect_right(self.at, gap.start), bisect_left(self.at, gap.end)
        if gap.wraps:
            return (*range(first, len(self.at)), *range(last))
        return tuple(range(first, last))

    def _group(self, gap: Gap, written: int | None, *, copied: bool) -> GapGroup | None:
        points = self._covered(gap)
        if not any(self.over[self.at[k]] for k in points):
            return None
        begins = self._interval_of(gap.start)
        since = begins if written is None else self._interval_of(written)
        key = (points, copied, gap.wraps, begins, since, gap if gap in self.whole else None)
        return self.groups.setdefault(key, GapGroup(points, copied, gap.wraps, begins, since))

    def _make_groups(self) -> None:
        tensors = self.graph.tensors
        by_tensor: dict[int, list[Gap]] = defaultdict(list)
        for gap in self.gaps:
            by_tensor[gap.tensor].append(gap)
        # Gaps of tensors, then inputs kept for recomputations.
        for tensor, gaps in by_tensor.items():
            copied = self._copied_in(tensor, gaps)
            for gap in gaps:
                if (group := self._group(gap, copied.get(gap), copied=gap in copied)) is not None:
                    group.gaps.append(gap)
                    group.size += tensors[tensor].nbytes / self.unit
        for held, gap, size in self.recomputations.held:  # their way out is not counted
            if (group := self._group(gap, None, copied=False)) is not None:
                group.held.append((held, size))
        for group in self.groups.values():
            self._limit(group)

    def _limit(self, group: GapGroup) -> None:
        """Limit the bytes that leave over the link to those neither recomputed nor held for recomputations."""
        terms = [
            (again, self.graph.tensors[gap.tensor].nbytes / self.unit)
            for gap in group.gaps
            if (again := self.recomputations.rematerialized.get(gap)) is not None
        ]
        if terms or group.held:
            group.most = self.lp.variable()
            held = [(column, -size) for column, size in group.held]
            self.lp.row([(group.most, 1.0), *added([*terms, *held])], lower=group.size, upper=group.size)

    # -- transfers

    def _flow(self, group: GapGroup, leaving: Transfers, coming: Transfers) -> None:
        """Balance bytes away at each sample point: those before, plus those that left, minus those that came back.

        Bytes that a wrapping gap has away at the end of one step, it has at the start of the next.
        """
        lp, end_of_step = self.lp, len(self.at)
        stored_between_steps = lp.variable(group.size) if group.wraps else -1
        # Sample points in order of time, with the end of the step between for a wrapping gap.
        stops = list(group.points)
        if group.wraps:
            stops.insert(sum(k > group.begins for k in stops), end_of_step)
        previous, start = None, group.since
        for k in stops:
            column = stored_between_steps
            if k != end_of_step:
                column = group.away[k] = lp.variable(INFINITY if group.most >= 0 else group.size)
                if group.most >= 0:
                    lp.row([(column, 1.0), (group.most, -1.0)], upper=0.0)
            # The end of a step is the start of the next one.
            self._move(group, range(-1, 0) if k == 0 else range(start, k), previous, column, leaving, coming)
            previous, start = column, k
        if previous is not None:
            coming[-1 if start == end_of_step else start].append((previous, 1.0))

    def _move(
        self, group: GapGroup, intervals: range, before: int | None, after: int, leaving: Transfers, coming: Transfers
    ) -> None:
        """Balance one stretch: `after` is `before` plus what leaves minus what comes back in `intervals`."""
        terms = [(after, 1.0), *minus(before)]
        for k in intervals:
            out = self.lp.variable()
            terms.append((out, -1.0))
            if group.copied:
                leaving[k].append((out, 1.0))
            if before is not None:
                back = self.lp.variable()
                terms.append((back, 1.0))
                coming[k].append((back, 1.0))
        self.lp.row(terms, lower=0.0, upper=0.0)

    def _links(self, leaving: Transfers, coming: Transfers) -> None:
        """Limit transfers of each interval to the link's rate, both directions together if half duplex."""
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
        """Return the times to move the budget's size out and back, as shares of the step."""
        device = self.device
        return (
            self.unit / device.offload_bytes_per_second / self.total,
            self.unit / device.prefetch_bytes_per_second / self.total,
        )

    # -- budget

    def _memory(self, k: int, p: int, busy: Transfers, away_besides: Terms) -> None:
        """Require that tensors away and smaller workspaces keep a sample point within budget."""
        terms = list(away_besides)
        constant = 0.0
        for group in self.groups.values():
            if k not in group.away:
                continue
            away = [(group.away[k], 1.0)]
            recomputed = group.size if group.most >= 0 else 0.0
            if group.most >= 0:  # recomputed: size - most
                away.append((group.most, -1.0))
            # Any part of a group may be away, but large tensors only as a whole.
            if self.whole.isdisjoint(group.gaps):
                terms += away
                constant += recomputed
            else:
                column = self.lp.variable(1.0)
                self.lp.row([(column, -group.size), *away], lower=-recomputed)
                self.absent.append(column)
                terms.append((column, group.size))
        # Algorithms with less workspace than the chosen one, at most one of them.
        op, chosen = self.program.op(self.program.steps[p]), self.program.algorithm(self.program.steps[p])
        others = []
        for algorithm in op.algorithms:
            saved = op.workspace_of(chosen) - algorithm.workspace_bytes
            longer = self.op_seconds[op.id] * (algorithm.slowdown - op.slowdown_of(chosen)) / self.total
            if saved > 0:
                column = self.lp.variable(1.0)
                others.append(column)
                self.choices.append(column)
                terms.append((column, saved / self.unit))
                busy[k].append((column, max(0.0, longer)))
        if others:
            self.lp.row([(c, 1.0) for c in others], upper=1.0)
        # Together they are at least the excess.
        self.lp.row(terms, lower=(self.live[p] - self.limits[p]) / self.unit - constant)
