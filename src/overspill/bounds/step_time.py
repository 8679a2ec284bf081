"""A proven lower bound on step time within a budget, by linear programming.

It holds for schedules that `simulate.check` accepts, that run ops in the graph's order, and that move only movable
tensors. Proof sketch: from such a schedule, read off a solution of no more delay than its own.

*Time.* A step's delay is how much later it starts than after the ops before it. A transfer occupies its direction of
the link all the time it takes, between its issue and its wait; a recomputation occupies compute.

*Memory.* Let a tensor be absent at a sample point in a gap, and come back at last by link. If no recomputation made it
before its copy was in the store, call it away from its first absence until that return: one way out, after its last
write, and one back. Otherwise it is *rematerialized* and not away: a recomputation ran in the gap. The transfers for it
after that count for its inputs below. Bytes away or rematerialized make up at each sample point for the bytes over the
budget. One copy serves all gaps between two writes. A persistent tensor needs one only once it is written, because the
store may have it from the step before. A tensor that is overwritten at a gap's end, or never used, may be gone at no
cost.

*Counts.* Gaps of one tensor do not overlap. So an op runs again at least as often as any one of its outputs is
rematerialized in different gaps. One run may serve several outputs, whose counts are not added.

*Inputs.* A tensor rematerialized in a gap was made from inputs. An input whose last use is before the gap is itself
rematerialized after that, or has been kept. From the run that reads it, the kept bytes live on in what it makes, and at
last in the tensor of the gap, which the program counts as gone. So a tree of inputs is kept for each gap. Their sizes
add up to no more than what is made from them, and over all trees to no more than an input's own. Their way out is not
counted: the copy may be one that serves a gap.

*Whole things.* An op takes one algorithm, and a tensor is on the device or not. Branching on some of these columns,
with all other columns free, leaves the least bound of the branches.

*Forced transfers* between single steps: `forced_transfers.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from overspill.core import Device, Graph
from overspill.planning.effort import Effort
from overspill.planning.linear_program import Terms, minus
from overspill.planning.step_program import StepProgram

from .forced_transfers import ForcedTransfers
from .relaxation import Relaxation, Transfers

LARGE = 0.05
MOST_WHOLE = 10
"""Tensors of at least this share of the budget, the largest ones, are away as a whole or not at all."""
SAFETY = 1e-6
"""Share of the optimum that is given away, because the solver works to a tolerance."""


def lower_bound_seconds(
    graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float], effort: Effort | None = None
) -> float:
    """Return the seconds that no schedule in the graph's order beats within the budget.

    They are at least the ops' own time. `seconds[i]` is the time of op `i` with its fastest algorithm. `effort` limits
    branching, None for the default.
    """
    program = StepProgram(graph)
    least = sum(seconds)
    if program.live_bytes().max(initial=0) <= budget_bytes:
        return least
    delay = StepTimeBound(program, device, budget_bytes, seconds).least_delay(effort or Effort.usual())
    return least if delay is None else max(least, least * (1.0 + delay * (1 - SAFETY)) * (1 - SAFETY))


class StepTimeBound(Relaxation):
    """The relaxation for the bound: recomputations take time, and single steps force transfers."""

    def least_delay(self, effort: Effort) -> float | None:
        """Return the least delay of any schedule, as a share of the ops' time; None if no schedule fits the budget."""
        return self.lp.integral_bound([self.choices, self.absent], effort.simplex_iterations)

    def _positions(self) -> Iterable[int]:
        self.forced = ForcedTransfers(self)
        nbytes = [tensor.nbytes for tensor in self.graph.tensors]
        large = [gap for gap in self.gaps if nbytes[gap.tensor] >= LARGE * self.budget_bytes]
        self.whole = set(sorted(large, key=lambda g: (-nbytes[g.tensor], g.start))[:MOST_WHOLE])
        return range(self.program.length) if self.forced.swaps or self.forced.around else ()

    def _force_transfers(self) -> None:
        self.forced.build()

    def _spend(self, busy: Transfers) -> None:
        """Require time for recomputations, after their tensors are dropped and before they are needed."""
        released, due = defaultdict[int, Terms](list), defaultdict[int, Terms](list)
        for op, again in self.recomputations.of_op.items():
            term = (again.runs, self.op_seconds[op] / self.total)
            released[self._interval_of(again.after)].append(term)
            due[self._interval_of(again.before - 1)].append(term)
        # Time spent so far is between what is due and what is allowed, at every interval's end.
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
