"""What single steps with little room force: whole tensors that cross the link, or are made again, between two steps.

Beside the least that a step needs, some tensors have no room there: each is away as a whole, and comes back between
that step and its next use. A *window* is the time from the end of one step to the start of another. In the window
of such a trip the tensor crosses the link, or an op runs again to make it; what that op reads and had no room at the
window's first step either, crosses the link or is made in the same window. Where an op runs again between two steps,
what both of them use is there as well, or leaves after the one and is back before the other.

Transfers of different tensors, or of one tensor in windows that do not overlap, are different transfers, and follow
one another in each direction of the link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .linear import added
from .program import Gap

if TYPE_CHECKING:
    from .bound import Bound

NEIGHBOURS = 8
"""How many windows' ends are looked at together with one window's start."""
DEPTH = 12
"""How many ops in a row a recomputation in a window is followed back."""
SHORT = 8
"""In a window of more steps, recomputations are not followed."""
NEGLIGIBLE = 1e-5
"""Share of the step below which a transfer is not looked at."""


@dataclass(frozen=True)
class Trip:
    """A gap in which the steps `first` and `last`, and maybe others between, have no room for the tensor."""

    gap: Gap
    first: int
    last: int


@dataclass(frozen=True)
class _Move:
    """A transfer of `tensor`, `out` or back, after step `start` and before step `end`: the share `column` of `time`."""

    tensor: int
    start: int
    end: int
    column: int
    time: float
    out: bool = False


class Windows:
    """The rows of the trips that a budget forces in a `Bound`."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self.graph, self.program, self.lp = bound.graph, bound.program, bound.lp
        self.room = bound.budget_bytes - bound.alone
        self.gaps: dict[int, list[Gap]] = defaultdict(list)
        for gap in bound.gaps:
            self.gaps[gap.tensor].append(gap)
        self.trips = list(self._forced())
        self.around = [gap for gap in bound.gaps if gap.wraps and any(self._without_room(gap))]
        self.leaving: list[_Move] = []
        self.coming: list[_Move] = []
        self.moved: dict[tuple[int, int, int], int] = {}  # (tensor, start, end) -> column
        self.again: dict[tuple[int, int, int], int | None] = {}  # (op, start, end) -> column, or None: it cannot

    def bind(self) -> None:
        """Make the rows."""
        self.fixed, self.leaves = self._between()
        for trip in self.trips:
            self._return(trip)
            self._departure(trip)
        for gap in self.around:
            self._over_the_end(gap)
        self._counts()
        both = [self.leaving, self.coming]
        for moves in both if self.bound.device.full_duplex else [self.leaving + self.coming]:
            self._in_turn(moves)

    # -- which trips

    def _forced(self) -> Iterable[Trip]:
        for gap in sorted(self.bound.gaps, key=lambda g: (g.start, g.tensor)):
            nbytes = self.graph.tensors[gap.tensor].nbytes
            if gap.wraps or max(self._times(gap.tensor)) < NEGLIGIBLE:
                continue
            away = np.flatnonzero(self.room[gap.start + 1 : gap.end] < nbytes)
            if away.size:
                yield Trip(gap, gap.start + 1 + int(away[0]), gap.start + 1 + int(away[-1]))

    def _times(self, tensor: int) -> tuple[float, float]:
        """Time that a transfer takes each way."""
        device, nbytes = self.bound.device, self.graph.tensors[tensor].nbytes
        return device.offload_seconds(nbytes) / self.bound.total, device.prefetch_seconds(nbytes) / self.bound.total

    def _absent(self, tensor: int, step: int) -> bool:
        """Whether `tensor`, born before `step`, cannot be on the device then."""
        touches = self.program.touches[tensor]
        if self.room[step] >= self.graph.tensors[tensor].nbytes or step in touches:
            return False
        dead = step > touches[-1] and not self.graph.tensors[tensor].persistent
        return dead or any(gap.covers(step) for gap in self.gaps[tensor])

    # -- the way back

    def _return(self, trip: Trip) -> None:
        tensor, end = trip.gap.tensor, trip.gap.end
        moved, again = self._get(tensor, trip.last, end, DEPTH)
        self.lp.row([(moved, 1.0), *([(again, 1.0)] if again is not None else [])], lower=1.0)
        if again is not None:
            self.lp.row([(self.bound.remakes[trip.gap], 1.0), (again, -1.0)], lower=0.0)

    def _get(self, tensor: int, start: int, end: int, depth: int) -> tuple[int, int | None]:
        """Columns: that `tensor` crosses the link in the window, and that the op which makes it runs there."""
        key = (tensor, start, end)
        if key not in self.moved:
            movable = self.graph.tensors[tensor].movable
            self.moved[key] = self.lp.variable(1.0 if movable else 0.0)
            if movable:
                self.coming.append(_Move(*key, self.moved[key], self._times(tensor)[1]))
        op = self.bound.maker(tensor, start)
        return self.moved[key], None if op is None else self._run(op, start, end, depth)

    def _run(self, op: int, start: int, end: int, depth: int) -> int | None:
        """The column of whether `op` runs again in the window, or None where it cannot."""
        key = (op, start, end)
        if key in self.again:
            return self.again[key]
        column = self.again[key] = self._making_room(op, start, end)
        if column is None:
            return None
        self.bound.time.beyond([(column, self.bound.op_seconds[op] / self.bound.total)], start, end)
        if depth and end - start <= SHORT:
            for read in dict.fromkeys(self.graph.ops[op].recompute_reads):
                if self.program.touches[read] and self._absent(read, start):
                    moved, again = self._get(read, start, end, depth - 1)
                    by = [(moved, 1.0), *([(again, 1.0)] if again is not None else [])]
                    self.lp.row([*by, (column, -1.0)], lower=0.0)
        return column

    # -- room to run again

    def _between(self) -> tuple[list[int], list[list[int]]]:
        """For each step, bytes that stay on the device until the next, and tensors that could leave in between."""
        always = sum(t.nbytes for t in self.graph.tensors if t.persistent and not t.movable)
        fixed = np.full(self.program.length + 1, always)
        leaves: list[list[int]] = [[] for _ in fixed]
        for gap in self.program.gaps:
            if gap.wraps or not self.bound.stays(gap):
                continue
            tensor = self.graph.tensors[gap.tensor]
            if tensor.movable:  # and so used in the next step
                leaves[gap.start].append(tensor.id)
            else:
                fixed[gap.start : gap.end] += tensor.nbytes
        return [int(nbytes) for nbytes in fixed], leaves

    def _making_room(self, op: int, start: int, end: int) -> int | None:
        """A column for a run of `op` in a window, with what has to leave for it between two steps."""
        if end - start > SHORT:
            return self.lp.variable(1.0)
        excess = {step: self._excess(op, step) for step in range(start, end)}
        if any(over <= 0 for over in excess.values()):
            return self.lp.variable(1.0)
        runs = [column for step, over in excess.items() if (column := self._run_between(op, step, over)) is not None]
        if not runs:
            return None
        column = self.lp.variable(1.0)
        self.lp.row([(column, -1.0), *((run, 1.0) for run in runs)], lower=0.0)
        return column

    def _excess(self, op: int, step: int) -> int:
        """Bytes by which a run of `op` after `step` is over the budget, if what the next step needs as well stays."""
        own = self._own(op)
        there = self.fixed[step] + sum(self.graph.tensors[t].nbytes for t in {*self.leaves[step], *own})
        algorithms, workspace = self.graph.ops[op].algorithms, self.graph.ops[op].workspace_bytes
        workspace = min((a.workspace_bytes for a in algorithms), default=workspace)
        return there + workspace - self.bound.budget_bytes

    def _own(self, op: int) -> set[int]:
        """Tensors that a recomputation of `op` needs and that are not always there."""
        reads, writes = self.graph.ops[op].recompute_reads, self.graph.ops[op].recompute_writes
        tensors = self.graph.tensors
        return {t for t in (*reads, *writes) if tensors[t].movable}

    def _run_between(self, op: int, step: int, over: int) -> int | None:
        """The column of a run of `op` right after `step`, for which `over` bytes leave and come back around it."""
        leave = [t for t in self.leaves[step] if t not in self._own(op)]
        if sum(self.graph.tensors[t].nbytes for t in leave) < over:
            return None
        run = self.lp.variable(1.0)
        spent = [(run, self.bound.op_seconds[op] / self.bound.total)]
        made_room = []
        for tensor in leave:
            left = self.lp.variable(1.0)
            key = (tensor, step, step + 1)
            out, back = self._times(tensor)
            if key not in self.moved:
                self.moved[key] = self.lp.variable(1.0)
                self.coming.append(_Move(*key, self.moved[key], back))
            self.lp.row([(self.moved[key], 1.0), (left, -1.0)], lower=0.0)
            made_room.append((left, min(1.0, self.graph.tensors[tensor].nbytes / over)))
            spent.append((left, back + (out if step in self.program.written[tensor] else 0.0)))
        self.lp.row([*made_room, (run, -1.0)], lower=0.0)
        self.bound.time.beyond(spent, step, step + 1)
        return run

    # -- the way out

    def _departure(self, trip: Trip) -> None:
        """A tensor that is not made again in the gap is in the store before it is away."""
        gap = trip.gap
        written = [step for step in self.program.written[gap.tensor] if step <= gap.start]
        if not written:  # as it was before the step: the store may have it
            return
        remakes = self.bound.remakes.get(gap)
        left = self.lp.variable(1.0)
        self.lp.row([(left, 1.0), *([(remakes, 1.0)] if remakes is not None else [])], lower=1.0)
        self.leaving.append(_Move(gap.tensor, written[-1], trip.first, left, self._times(gap.tensor)[0], out=True))

    # -- over the end of the step

    def _without_room(self, gap: Gap) -> tuple[list[int], list[int]]:
        """The steps of a gap that wraps which have no room for its tensor: at the end of the step, and at its start."""
        lacking = [int(p) for p in np.flatnonzero(self.room < self.graph.tensors[gap.tensor].nbytes)]
        return [p for p in lacking if p > gap.start], [p for p in lacking if p < gap.end]

    def _over_the_end(self, gap: Gap) -> None:
        """A persistent tensor that has no room comes back in each step, and if it was written goes out in each.

        It may be in the store from one step to the next: then it comes back before its first use, and has left, as it
        is in the end, by the step's end. Else it comes back by the end, or leaves after the start.
        """
        tensor, length = gap.tensor, self.program.length
        tail, head = self._without_room(gap)
        back = [(head[-1], gap.end)] if head else [(tail[-1], length), (-1, gap.end)]
        self._one_of(tensor, back, out=False)
        if written := self.program.written[tensor]:
            self._one_of(tensor, [(written[-1], tail[0])] if tail else [(written[-1], length), (-1, head[0])], out=True)

    def _one_of(self, tensor: int, windows: list[tuple[int, int]], *, out: bool) -> None:
        """The tensor crosses the link in one of `windows`."""
        moves, time = self.leaving if out else self.coming, self._times(tensor)[0 if out else 1]
        columns = [self.lp.variable(1.0) for _ in windows]
        self.lp.row([(column, 1.0) for column in columns], lower=1.0)
        moves += [_Move(tensor, *w, column, time, out) for w, column in zip(windows, columns, strict=True)]

    # -- all together

    def _counts(self) -> None:
        """An op runs again at least as often as in windows that do not overlap."""
        by_op: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (op, start, end), column in self.again.items():
            if column is not None:
                by_op[op].append((end, start, column))
        for op, windows in by_op.items():
            apart, free = [], -1
            runs = self.bound.runs(op, min(start for _, start, _ in windows), max(end for end, _, _ in windows))
            for end, start, column in sorted(windows):
                if start >= free:
                    apart.append((column, -1.0))
                    free = end
                else:
                    self.lp.row([(runs, 1.0), (column, -1.0)], lower=0.0)
            self.lp.row([(runs, 1.0), *apart], lower=0.0)

    def _in_turn(self, moves: list[_Move]) -> None:
        """Between the start of one window and the end of another, all transfers that lie there follow one another."""
        moves.sort(key=lambda m: (m.start, m.end))
        seen: set[tuple[int, int]] = set()
        for i, move in enumerate(moves):
            ends = sorted({m.end for m in moves[i : i + 8 * NEIGHBOURS] if m.end >= move.end})[:NEIGHBOURS]
            for end in ends:
                if (move.start, end) in seen:
                    continue
                seen.add((move.start, end))
                self.bound.time.at_most(self._apart(moves, i, end), move.start, end, after=True)

    def _apart(self, moves: list[_Move], first: int, end: int) -> list[tuple[int, float]]:
        """Of the moves from `first` on that are over by `end`, different ones: of each tensor in windows apart."""
        inside = []
        for move in moves[first:]:
            if move.start >= end:
                break
            if move.end <= end:
                inside.append(move)
        free: dict[tuple[int, bool], int] = {}
        terms = []
        for move in sorted(inside, key=lambda m: (m.end, m.start)):
            if move.start >= free.get((move.tensor, move.out), -1):
                terms.append((move.column, move.time))
                free[move.tensor, move.out] = move.end
        return added(terms)
