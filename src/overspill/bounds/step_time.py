"""A proven lower bound on a step's time within a budget: the optimum of a linear program that every schedule solves.

It holds for schedules that `simulate.check` accepts, that run ops in the graph's order, and that move only movable
tensors. Proof sketch: from such a schedule read off a solution of no more delay than its own.

*Time.* A step's delay is how much later it starts than after the ops before it. A transfer occupies its direction of
the link all the time it takes, between its issue and its wait; a recomputation occupies compute.

*Memory.* Let a tensor be absent at a marker in a gap, and come back at last by link. If no recomputation made it
before its copy was in the store, call it away from its first absence until that return: one way out, after its last
write, and one back. Otherwise it is *remade* and not away: a recomputation ran in the gap; what the link did for it
after that counts for its inputs below. Bytes away or remade make up at each marker for what is over the budget. One
copy serves all gaps between two writes; a persistent tensor needs one only once it is written, for the store may have
it from the step before. What is overwritten at a gap's end, or never used, may be gone at no cost.

*Counts.* Gaps of one tensor do not overlap, so an op runs again at least as often as any one of its outputs is remade
in different gaps; one run may serve several outputs, whose counts are not added.

*Inputs.* A tensor remade in a gap was made from inputs. One whose last use lies before the gap, is itself remade after
that, or has been kept. From the run that reads it the kept bytes live on in what it makes, and at last in the tensor
of the gap, which the program counts as gone: so a tree of inputs is kept for each gap, with sizes that add up to no
more than what is made from them, and over all trees to no more than an input's own. Their way out is not counted: the
copy may be one that serves a gap.

*Whole things.* An op takes one algorithm, and a tensor is on the device or not: branching on some of these columns, with
all other columns free, leaves the least bound of the branches.

*Windows* between single steps: `windows.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from overspill.core import Device, Graph
from overspill.planning.step_program import Gap, Program

from .fluid import Fluid, Terms, Transfers
from .forced_transfers import Windows
from .linear_program import minus

LARGE = 0.05
MOST_WHOLE = 10
"""Tensors of this share of the budget, and no more than so many, are away as a whole or not at all."""
EFFORT = 20_000
"""About how many simplex iterations are spent on that, and on ops that take one algorithm as a whole."""
LARGEST_TREE = 24
"""How many inputs, and inputs of these, a recomputation is followed to."""
SAFETY = 1e-6
"""Share of the optimum that is given away, for the solver works to a tolerance."""


def lower_bound_seconds(graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> float:
    """A step time that no schedule in the graph's order beats within the budget; the ops' own time at the least."""
    program = Program(graph)
    least = sum(seconds)
    if program.live_bytes().max(initial=0) <= budget_bytes:
        return least
    delay = Bound(program, device, budget_bytes, seconds).least_delay()
    return least if delay is None else max(least, least * (1.0 + delay * (1 - SAFETY)) * (1 - SAFETY))


def _by_reader(tree: Mapping[int, int]) -> dict[int, list[int]]:
    """What each tensor of a tree is made from, those that are nearest to its root first."""
    found: dict[int, list[int]] = defaultdict(list)
    for tensor, made in tree.items():
        found[made].append(tensor)
    return found


@dataclass
class _Again:
    """How often an op runs again: a column, and the steps after and before which all its runs are."""

    runs: int
    after: int
    before: int


class Bound(Fluid):
    """The relaxation whose optimum is a bound. `program` is the graph's own, without recomputations."""

    two_graphs: ClassVar[bool] = False
    held_pays: ClassVar[bool] = False

    def __init__(self, program: Program, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        self.again: dict[int, _Again] = {}
        self.remade: dict[Gap, int] = {}
        self.remakes: dict[Gap, int] = {}  # the share of a gap in which its tensor's op runs again, for whatever end
        super().__init__(program, device, budget_bytes, seconds)

    def least_delay(self) -> float | None:
        """A share of the ops' time by which every step is longer, or None where no schedule is within the budget."""
        self._within(1.0)
        return self.lp.integral_bound([self.choices, self.absent], EFFORT)

    def maker(self, tensor: int, step: int) -> int | None:
        """The op whose recomputation gives `tensor` as it is after `step`, or None where none does."""
        written = self.program.written[tensor]
        before = bisect_right(written, step)
        if not before or self.graph.tensors[tensor].persistent:
            return None
        op = self.graph.ops[written[before - 1]]
        return op.id if tensor in op.recompute_writes and tensor not in op.recompute_reads else None

    def runs(self, op: int, after: int, before: int) -> int:
        """The column of how often `op` runs again, which may be after step `after` and before step `before`."""
        if op not in self.again:
            self.again[op] = _Again(self.lp.variable(), after, before)
        known = self.again[op]
        known.after, known.before = min(known.after, after), max(known.before, before)
        return known.runs

    def _may_be_away(self, gap: Gap) -> bool:
        if self._may_be_dropped(gap) or not (gap.wraps or gap.end - gap.start > 1):
            return False
        return self.graph.tensors[gap.tensor].movable or self.maker(gap.tensor, gap.start) is not None

    def stays(self, gap: Gap) -> bool:
        """Whether a tensor cannot be away in a gap: it would have to cross the link between two steps, or cannot move."""
        return not (
            self._may_be_away(gap) or self._may_be_dropped(gap) or self.maker(gap.tensor, gap.start) is not None
        )

    def _may_be_dropped(self, gap: Gap) -> bool:
        """A gap that ends where the tensor is overwritten, and not read."""
        return gap.end < self.program.length and gap.tensor not in self.program.op(self.program.steps[gap.end]).reads

    def _never_there_bytes(self) -> int:
        touches = self.program.touches
        return sum(t.nbytes for t in self.graph.tensors if t.persistent and t.movable and not touches[t.id])

    def _copied_in(self, tensor: int, gaps: Sequence[Gap]) -> dict[Gap, int | None]:
        """Of the gaps between two writes the longest pays; what is as it was before the step may have a copy."""
        written = self.program.written[tensor]
        found: dict[int, Gap] = {}
        for gap in sorted(gaps, key=lambda g: (g.wraps, g.end - g.start)):
            if writes := bisect_right(written, gap.start):
                found[writes] = gap
        return {gap: written[writes - 1] for writes, gap in found.items()}

    # -- what runs again

    def _recomputations(self) -> None:
        by_op: dict[tuple[int, int], Terms] = defaultdict(list)  # (op, output) -> shares of runs at different times
        for gap in self.gaps:
            op = self.maker(gap.tensor, gap.start)
            if op is None:
                continue
            self.remade[gap], self.remakes[gap] = self.lp.variable(1.0), self.lp.variable(1.0)
            self.lp.row([(self.remakes[gap], 1.0), (self.remade[gap], -1.0)], lower=0.0)
            self.runs(op, gap.start, gap.end)
            by_op[op, gap.tensor].append((self.remakes[gap], -1.0))
        for op, tensor, column in self._inputs():
            self.lp.row([(self.again[op].runs, 1.0), (column, -1.0), *by_op[op, tensor]], lower=0.0)
        for (op, _), terms in by_op.items():
            self.lp.row([(self.again[op].runs, 1.0), *terms], lower=0.0)

    def _inputs(self) -> Iterable[tuple[int, int, int]]:
        """Keep or remake the inputs that are used no more: the ops that run again, for which output, and the columns."""
        trees = {gap: self._tree(gap) for gap in self.remade}
        shared = Counter(chain.from_iterable(trees.values()))
        for gap, tree in trees.items():
            by = {gap.tensor: (self.remade[gap], float(self._nbytes(gap.tensor)))}  # column and bytes of what is made
            for made, inputs in _by_reader(tree).items():
                column, size = by[made]
                share = {u: self._nbytes(u) / shared[u] for u in inputs}
                scale = min(1.0, size / sum(share.values())) if any(share.values()) else 0.0
                for u in inputs:
                    last = self.program.touches[u][-1]
                    kept, again = self.lp.variable(1.0), None
                    self.held.append((kept, Gap(u, last, gap.end), scale * share[u] / self.unit))
                    if (maker := self.maker(u, last)) is not None:
                        again = self.lp.variable(1.0)
                        self.runs(maker, last, gap.end)
                        by[u] = again, scale * share[u]
                        yield maker, u, again
                    self.lp.row([(column, 1.0), (kept, -1.0), *minus(again)], upper=0.0)

    def _tree(self, gap: Gap) -> dict[int, int]:
        """Inputs that are used no more when a recomputation reads them which the gap may need, with what it makes."""
        tree: dict[int, int] = {}
        pending = [(gap.tensor, gap.start)]
        while pending and len(tree) < LARGEST_TREE:
            made, after = pending.pop(0)
            if (op := self.maker(made, after)) is not None:
                dead = [u for u in self._gone(op, after) if u not in tree]
                tree |= dict.fromkeys(dead, made)
                pending += [(u, self.program.touches[u][-1]) for u in dead]
        return tree

    def _nbytes(self, tensor: int) -> int:
        return self.graph.tensors[tensor].nbytes

    def _gone(self, op: int, after: int) -> list[int]:
        """What a recomputation of `op` reads and nobody uses after step `after`."""
        reads = dict.fromkeys(self.graph.ops[op].recompute_reads)
        return [u for u in reads if not self.graph.tensors[u].persistent and self.program.touches[u][-1] <= after]

    def _remade(self, gap: Gap) -> int | None:
        return self.remade.get(gap)

    # -- time

    def _windows(self) -> Iterable[int]:
        self.windows = Windows(self)
        large = [gap for gap in self.gaps if self._nbytes(gap.tensor) >= LARGE * self.budget_bytes]
        self.whole = set(sorted(large, key=lambda g: (-self._nbytes(g.tensor), g.start))[:MOST_WHOLE])
        return range(self.program.length) if self.windows.trips or self.windows.around else ()

    def _bind_windows(self) -> None:
        self.windows.bind()

    def _spend(self, busy: Transfers) -> None:
        """Recomputations take time after their tensors are dropped and before they are needed."""
        released, due = defaultdict[int, Terms](list), defaultdict[int, Terms](list)
        for op, again in self.again.items():
            term = (again.runs, self.op_seconds[op] / self.total)
            released[self._interval_of(again.after)].append(term)
            due[self._interval_of(again.before - 1)].append(term)
        wanted = allowed = done = None
        for k in range(len(self.at)):
            spent, now = self.lp.variable(), self.lp.variable()
            self.lp.row([(now, 1.0), (spent, -1.0), *minus(done)], lower=0.0, upper=0.0)
            want, allow = self.lp.variable(), self.lp.variable()
            self.lp.row([(want, 1.0), *((c, -s) for c, s in due[k]), *minus(wanted)], lower=0.0, upper=0.0)
            self.lp.row([(allow, 1.0), *((c, -s) for c, s in released[k]), *minus(allowed)], lower=0.0, upper=0.0)
            self.lp.row([(now, 1.0), (want, -1.0)], lower=0.0)
            self.lp.row([(allow, 1.0), (now, -1.0)], lower=0.0)
            self.time.beyond([(spent, 1.0), *busy.get(k, ())], *self._interval(k))
            done, wanted, allowed = now, want, allow
