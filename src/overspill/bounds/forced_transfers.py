"""Transfers and recomputations of whole tensors that a tight budget forces.

A step may need so much memory itself that some other tensors do not fit. Each of these is away as a whole, and comes
back between that step and its next use. A *window* is the time from the end of one step to the start of another. In the
window of such a swap the tensor crosses the link, or an op runs again to make it. Inputs of that op that do not fit at
the window's first step either, cross the link or are made in the same window. If an op runs again between two steps,
the tensors that both of these use are on the device as well. Or they leave after the one and are back before the other.

Transfers of different tensors, or of one tensor in disjoint windows, are different transfers. In each direction of the
link they follow one another. So do runs of different ops, and of one op in such windows, between two steps. A tensor
that has not left before the first step at which it does not fit, and is not recomputed after that, cannot come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from overspill.planning.linear_program import Terms, added
from overspill.planning.step_program import Gap

from .relaxation import Relaxation

NEIGHBOURS = 8
"""Number of later windows' ends combined with each window's start."""
DEPTH = 12
"""Most ops in a row through which a recomputation in a window is followed back."""
SHORT = 8
"""In longer windows, in steps, memory for recomputations is not considered, and they are followed only as long as …"""
MOST_FOLLOWED = 2000
"""… there are at most this many windows of recomputations."""
NEGLIGIBLE = 1e-5
"""Transfers that take less than this share of the step are ignored."""


@dataclass(frozen=True)
class ForcedSwap:
    """A gap whose tensor does not fit at steps `first` and `last`, and maybe at some between."""

    gap: Gap
    first: int
    last: int


@dataclass(frozen=True)
class _Move:
    """A transfer, `out` or back, or a run of an op, between two steps."""

    of: int
    """The tensor or op."""
    start: int
    end: int
    column: int
    """The column of the share of it that is made."""
    time: float
    """As a share of the step's time."""
    out: bool = False


class ForcedTransfers:
    """Adds rows to a relaxation for the swaps that its budget forces."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation, self.recomputations = relaxation, relaxation.recomputations
        self.graph, self.program, self.lp = relaxation.graph, relaxation.program, relaxation.lp
        self.room = relaxation.budget_bytes - relaxation.alone
        self.gaps: dict[int, list[Gap]] = defaultdict(list)
        for gap in relaxation.gaps:
            self.gaps[gap.tensor].append(gap)
        self.swaps = list(self._forced())
        self.around = [gap for gap in relaxation.gaps if gap.wraps and any(self._without_room(gap))]
        self.leaving: list[_Move] = []
        self.coming: list[_Move] = []
        self.moved: dict[tuple[int, int, int], int] = {}  # (tensor, start, end) -> column
        self.again: dict[tuple[int, int, int], int | None] = {}  # (op, start, end) -> column, or None: it cannot

    def build(self) -> None:
        """Add all rows."""
        # Rows of single swaps, then of runs and transfers that follow one another.
        self.fixed, self.leaves = self._between()
        for swap in self.swaps:
            self._return(swap)
            self._departure(swap)
        for gap in self.around:
            self._over_the_end(gap)
        reruns = self._reruns()
        self._counts(reruns)
        for terms, start, end in self._in_turn(reruns):
            self.relaxation.time.beyond(terms, start, end)
        both = [self.leaving, self.coming]
        for moves in both if self.relaxation.device.full_duplex else [self.leaving + self.coming]:
            for terms, start, end in self._in_turn(moves):
                self.relaxation.time.at_most(terms, start, end, after=True)

    # -- which swaps

    def _forced(self) -> Iterable[ForcedSwap]:
        for gap in sorted(self.relaxation.gaps, key=lambda g: (g.start, g.tensor)):
            nbytes = self.graph.tensors[gap.tensor].nbytes
            if gap.wraps or max(self._times(gap.tensor)) < NEGLIGIBLE:
                continue
            away = np.flatnonzero(self.room[gap.start + 1 : gap.end] < nbytes)
            if away.size:
                yield ForcedSwap(gap, gap.start + 1 + int(away[0]), gap.start + 1 + int(away[-1]))

    def _times(self, tensor: int) -> tuple[float, float]:
        """Return the times of a transfer out and back, as shares of the step."""
        device, nbytes = self.relaxation.device, self.graph.tensors[tensor].nbytes
        return device.offload_seconds(nbytes) / self.relaxation.total, device.prefetch_seconds(
            nbytes
        ) / self.relaxation.total

    def _absent(self, tensor: int, step: int) -> bool:
        """Return whether `tensor`, made before `step`, cannot be on the device then."""
        touches = self.program.touches[tensor]
        if self.room[step] >= self.graph.tensors[tensor].nbytes or step in touches:
            return False
        dead = step > touches[-1] and not self.graph.tensors[tensor].persistent
        return dead or any(gap.covers(step) for gap in self.gaps[tensor])

    # -- the way back

    def _return(self, swap: ForcedSwap) -> None:
        tensor, end = swap.gap.tensor, swap.gap.end
        moved, again = self._get(tensor, swap.last, end, DEPTH)
        self.lp.row([(moved, 1.0), *([(again, 1.0)] if again is not None else [])], lower=1.0)
        if again is not None:
            self.lp.row([(self.recomputations.reruns[swap.gap], 1.0), (again, -1.0)], lower=0.0)

    def _get(self, tensor: int, start: int, end: int, depth: int) -> tuple[int, int | None]:
        """Return columns: `tensor` crosses the link in the window; the op that makes it runs there."""
        key = (tensor, start, end)
        if key not in self.moved:
            movable = self.graph.tensors[tensor].movable
            self.moved[key] = self.lp.variable(1.0 if movable else 0.0)
            if movable:
                self.coming.append(_Move(*key, self.moved[key], self._times(tensor)[1]))
        return self.moved[key], self._run_for(tensor, start, end, depth)

    def _run_for(self, tensor: int, start: int, end: int, depth: int) -> int | None:
        """Return the column of another run in the window of the op that makes `tensor`; None if impossible."""
        op = self.recomputations.maker(tensor, start)
        return None if op is None else self._run(op, start, end, depth)

    def _run(self, op: int, start: int, end: int, depth: int) -> int | None:
        """Return the column of another run of `op` in the window; None if impossible."""
        key = (op, start, end)
        if key in self.again:
            return self.again[key]
        column = self.again[key] = self._making_room(op, start, end)
        if column is None:
            return None
        # Its inputs that are away have to come back too.
        if depth and (end - start <= SHORT or len(self.again) < MOST_FOLLOWED):
            for read in dict.fromkeys(self.graph.ops[op].recompute_reads):
                if self.program.touches[read] and self._absent(read, start):
                    moved, again = self._get(read, start, end, depth - 1)
                    by = [(moved, 1.0), *([(again, 1.0)] if again is not None else [])]
                    self.lp.row([*by, (column, -1.0)], lower=0.0)
        return column

    # -- memory to run again

    def _between(self) -> tuple[list[int], list[list[int]]]:
        """Return for each step the bytes that stay until the next, and the tensors that could leave in between."""
        always = sum(t.nbytes for t in self.graph.tensors if t.persistent and not t.movable)
        fixed = np.full(self.program.length + 1, always)
        leaves: list[list[int]] = [[] for _ in fixed]
        for gap in self.program.gaps:
            if gap.wraps or not self.relaxation.stays(gap):
                continue
            tensor = self.graph.tensors[gap.tensor]
            if tensor.movable:  # and so used in the next step
                leaves[gap.start].append(tensor.id)
            else:
                fixed[gap.start : gap.end] += tensor.nbytes
        return [int(nbytes) for nbytes in fixed], leaves

    def _making_room(self, op: int, start: int, end: int) -> int | None:
        """Return a column for a run of `op` in a window with enough free memory, or None."""
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
        """Return the bytes over budget of a run of `op` after `step`, if tensors of the next step stay."""
        own = self._own(op)
        there = self.fixed[step] + sum(self.graph.tensors[t].nbytes for t in {*self.leaves[step], *own})
        algorithms, workspace = self.graph.ops[op].algorithms, self.graph.ops[op].workspace_bytes
        workspace = min((a.workspace_bytes for a in algorithms), default=workspace)
        return there + workspace - self.relaxation.budget_bytes

    def _own(self, op: int) -> set[int]:
        """Return the movable tensors that a recomputation of `op` needs."""
        reads, writes = self.graph.ops[op].recompute_reads, self.graph.ops[op].recompute_writes
        tensors = self.graph.tensors
        return {t for t in (*reads, *writes) if tensors[t].movable}

    def _run_between(self, op: int, step: int, over: int) -> int | None:
        """Return the column of a run of `op` after `step`, with `over` bytes away, or None."""
        leave = [t for t in self.leaves[step] if t not in self._own(op)]
        if sum(self.graph.tensors[t].nbytes for t in leave) < over:
            return None
        # The run, and its time; each tensor that leaves for it takes time on the link.
        run = self.lp.variable(1.0)
        spent = [(run, self.relaxation.op_seconds[op] / self.relaxation.total)]
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
        self.relaxation.time.beyond(spent, step, step + 1)
        return run

    # -- the way out

    def _departure(self, swap: ForcedSwap) -> None:
        """Require that a tensor is in the store before it is first away, or recomputed after."""
        gap = swap.gap
        written = [step for step in self.program.written[gap.tensor] if step <= gap.start]
        if not written:  # as it was before the step: the store may have it
            return
        again = self._run_for(gap.tensor, swap.first, gap.end, DEPTH)
        left = self.lp.variable(1.0)
        self.lp.row([(left, 1.0), *([(again, 1.0)] if again is not None else [])], lower=1.0)
        if again is not None and swap.first != swap.last:  # else it is as for the way back
            self.lp.row([(self.recomputations.reruns[gap], 1.0), (again, -1.0)], lower=0.0)
        self.leaving.append(_Move(gap.tensor, written[-1], swap.first, left, self._times(gap.tensor)[0], out=True))

    # -- over the end of the step

    def _without_room(self, gap: Gap) -> tuple[list[int], list[int]]:
        """Return the steps in a wrapping gap at which its tensor does not fit, at the end and at the start."""
        lacking = [int(p) for p in np.flatnonzero(self.room < self.graph.tensors[gap.tensor].nbytes)]
        return [p for p in lacking if p > gap.start], [p for p in lacking if p < gap.end]

    def _over_the_end(self, gap: Gap) -> None:
        """Require transfers of a persistent tensor that does not fit: back, and out if written.

        It may be in the store from one step to the next. Then it comes back before its first use, and has left, with
        its last values, by the step's end. Otherwise it comes back by the end, or leaves after the start.
        """
        tensor, length = gap.tensor, self.program.length
        tail, head = self._without_room(gap)
        back = [(head[-1], gap.end)] if head else [(tail[-1], length), (-1, gap.end)]
        self._one_of(tensor, back, out=False)
        if written := self.program.written[tensor]:
            self._one_of(tensor, [(written[-1], tail[0])] if tail else [(written[-1], length), (-1, head[0])], out=True)

    def _one_of(self, tensor: int, windows: list[tuple[int, int]], *, out: bool) -> None:
        """Require that the tensor crosses the link in one of `windows`."""
        moves, time = self.leaving if out else self.coming, self._times(tensor)[0 if out else 1]
        columns = [self.lp.variable(1.0) for _ in windows]
        self.lp.row([(column, 1.0) for column in columns], lower=1.0)
        moves += [_Move(tensor, *w, column, time, out) for w, column in zip(windows, columns, strict=True)]

    # -- all together

    def _reruns(self) -> list[_Move]:
        """Return the runs of ops in windows, in order."""
        seconds, total = self.relaxation.op_seconds, self.relaxation.total
        found = (_Move(*key, c, seconds[key[0]] / total) for key, c in self.again.items() if c is not None)
        return sorted(found, key=_in_order)

    def _counts(self, reruns: Sequence[_Move]) -> None:
        """Require at least as many runs of an op as in any disjoint windows."""
        of: dict[int, list[_Move]] = defaultdict(list)
        for run in reruns:
            of[run.of].append(run)
        for op, windows in of.items():
            runs = self.recomputations.runs(op, windows[0].start, max(w.end for w in windows))
            for window in windows:
                self.lp.row([(runs, 1.0), (window.column, -1.0)], lower=0.0)
            self.lp.row(
                [(runs, 1.0), *((window.column, -1.0) for window in _apart(windows, self.program.length))], lower=0.0
            )

    def _in_turn(self, moves: Iterable[_Move]) -> Iterable[tuple[Terms, int, int]]:
        """Yield sums of times between two steps: of all moves whose windows are between them."""
        moves = sorted(moves, key=_in_order)
        self._nested(moves)
        starts = [move.start for move in moves]
        seen: set[tuple[int, int]] = set()
        for i, move in enumerate(moves):
            ends = sorted({m.end for m in moves[i : i + 8 * NEIGHBOURS] if m.end >= move.end})[:NEIGHBOURS]
            for end in ends:
                if (move.start, end) not in seen:
                    seen.add((move.start, end))
                    there = moves[bisect_left(starts, move.start) : bisect_left(starts, end)]
                    yield added((m.column, m.time) for m in _apart(there, end)), move.start, end

    def _nested(self, moves: list[_Move]) -> None:
        """Require that a move in a window is one in a longer window with the same start."""
        before: dict[tuple[int, bool, int], _Move] = {}
        for move in moves:
            key = move.of, move.out, move.start
            if key in before:
                self.lp.row([(move.column, 1.0), (before[key].column, -1.0)], lower=0.0)
            before[key] = move


def _in_order(move: _Move) -> tuple[int, int]:
    return move.start, move.end


def _apart(moves: Sequence[_Move], end: int) -> list[_Move]:
    """Return moves that end by `end`, in disjoint windows for one tensor or op; `moves` are in order."""
    free: dict[tuple[int, bool], int] = {}
    found = []
    for move in reversed(moves):
        if move.end <= free.get((move.of, move.out), end):
            found.append(move)
            free[move.of, move.out] = move.start
    return found
