"""Recomputations in a relaxation: columns for ops that run again, and for kept inputs.

An op runs again at least as often as any one of its outputs is rematerialized in different gaps. Inputs of a run that
have no later use are themselves rematerialized, or have been kept. They are a tree of inputs for each gap. Their sizes
add up to no more than what is made from them, and over all trees to no more than an input's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from overspill.planning.linear_program import LinearProgram, Terms, minus
from overspill.planning.step_program import Gap, StepProgram

LARGEST_TREE = 24
"""Most inputs, and inputs of these, to which a recomputation is followed."""


@dataclass
class Reruns:
    """The column of how often an op runs again, and between which steps."""

    runs: int
    after: int
    before: int


class Recomputations:
    """Columns of recomputations in a linear program; sizes are shares of `unit` bytes."""

    def __init__(self, program: StepProgram, lp: LinearProgram, unit: float) -> None:
        self.program, self.graph, self.lp, self.unit = program, program.graph, lp, unit
        self.of_op: dict[int, Reruns] = {}
        self.rematerialized: dict[
            Gap, int
        ] = {}  # the share of a gap's tensor that is away all through it and made again
        self.reruns: dict[Gap, int] = {}  # the share of a gap in which its tensor's op runs again, for whatever end
        self.held: list[tuple[int, Gap, float]] = []  # columns of inputs kept for recomputations, and their sizes

    def maker(self, tensor: int, step: int) -> int | None:
        """Return the op that recomputes `tensor` as it is after `step`, or None."""
        written = self.program.written[tensor]
        before = bisect_right(written, step)
        if not before or self.graph.tensors[tensor].persistent:
            return None
        op = self.graph.ops[written[before - 1]]
        return op.id if tensor in op.recompute_writes and tensor not in op.recompute_reads else None

    def runs(self, op: int, after: int, before: int) -> int:
        """Return the column of how often `op` runs again, between these steps."""
        if op not in self.of_op:
            self.of_op[op] = Reruns(self.lp.variable(), after, before)
        known = self.of_op[op]
        known.after, known.before = min(known.after, after), max(known.before, before)
        return known.runs

    def build(self, gaps: Sequence[Gap]) -> None:
        """Add columns of all recomputations that may end one of `gaps`."""
        by_op: dict[tuple[int, int], Terms] = defaultdict(list)  # (op, output) -> shares of runs at different times
        for gap in gaps:
            op = self.maker(gap.tensor, gap.start)
            if op is None:
                continue
            self.rematerialized[gap], self.reruns[gap] = self.lp.variable(1.0), self.lp.variable(1.0)
            self.lp.row([(self.reruns[gap], 1.0), (self.rematerialized[gap], -1.0)], lower=0.0)
            self.runs(op, gap.start, gap.end)
            by_op[op, gap.tensor].append((self.reruns[gap], -1.0))
        # An op runs at least as often as for each single output.
        for op, tensor, column in self._inputs():
            self.lp.row([(self.of_op[op].runs, 1.0), (column, -1.0), *by_op[op, tensor]], lower=0.0)
        for (op, _), terms in by_op.items():
            self.lp.row([(self.of_op[op].runs, 1.0), *terms], lower=0.0)

    def _inputs(self) -> Iterable[tuple[int, int, int]]:
        """Keep or remake inputs without later use. Yields ops that run again, for which output, and the columns."""
        # An input that several trees share counts in each by a part.
        trees = {gap: self._tree(gap) for gap in self.rematerialized}
        shared = Counter(chain.from_iterable(trees.values()))
        for gap, tree in trees.items():
            by = {
                gap.tensor: (self.rematerialized[gap], float(self._nbytes(gap.tensor)))
            }  # column and bytes of what is made
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
        """Return inputs without later use that recomputations for the gap may read, with what each makes."""
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
        """Return the inputs of a recomputation of `op` that are not used after step `after`."""
        reads = dict.fromkeys(self.graph.ops[op].recompute_reads)
        return [u for u in reads if not self.graph.tensors[u].persistent and self.program.touches[u][-1] <= after]


def _by_reader(tree: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the inputs of each tensor of a tree, nearest to its root first."""
    found: dict[int, list[int]] = defaultdict(list)
    for tensor, made in tree.items():
        found[made].append(tensor)
    return found
