"""A lower bound on a whole step's time, for any order of updates.

The updates are left out of the program. Every schedule of the step has a schedule of the rest in it: forward and
backward in the graph's order. No gradient outlives backward there. `step_time.py` has a linear program for the rest;
here the needs of updates are added to it. One more op is at the end of all, so that the last op of backward and the end
of the step have an interval between them.

*Time.* An update runs after the last op of forward and backward that it depends on, in whichever interval, and takes
its time there.

*Optimizer state*, tensors that updates alone touch, is away at a sample point before its last use or after it. The
latter only from the interval on in which that update can run. Of every schedule is true:

- What is away comes back by link alone. From one sample point to the next the bytes away shrink by no more than
  what
  came in between, where a transfer under way has brought a part of its tensor. Before its last use that is true up to
  the step's end, where all is back; it begins with what is *stored* between steps. After its last use it ends with
  that.
- What leaves has a copy. Before the last use that may be the stored one, or one made in this step so far. After
  it,
  and for what is stored in the end, it was made in this step after the last write. The store has what nothing writes.
- Both kinds together are at most the tensors' bytes, and are not on the device at the sample point.

What holds for each tensor holds for sums over those that are ready in the same intervals.

The link has a bound of its own. If an op cannot fit with everything that outlives the step, the rest is away. Each of
these tensors is used in every step, so it comes back over the link at least once a step. If it is updated, it also
leaves once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from overspill.core import Device, Graph, LayerType, Op, Phase, numbered
from overspill.planning.effort import Effort
from overspill.planning.gaps import swappable_gaps
from overspill.planning.linear_program import Terms, minus
from overspill.planning.order import followers_of
from overspill.planning.step_program import StepProgram

from .relaxation import Transfers
from .step_time import SAFETY, StepTimeBound


def whole_step_bound_seconds(graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> float:
    """Return the seconds that no schedule of the whole step beats within the budget, wherever it puts the updates."""
    compute = sum(seconds)
    if StepProgram(graph).live_bytes().max(initial=0) <= budget_bytes:
        return compute
    moving = forced_link_seconds(graph, device, budget_bytes)
    # A transfer concurrent with compute takes a share of it; one that compute waits for takes all of its time. The
    # time by which it slows down an op is itself time in which it runs, hence the denominator.
    share = device.transfer_compute_share / (1 + device.transfer_compute_share)
    bound = WholeStepBound(graph, device, budget_bytes, seconds)
    delay = bound.least_delay(Effort.usual())
    least = 0.0 if delay is None else bound.total * (1.0 + delay * (1 - SAFETY)) * (1 - SAFETY)
    return max(compute + share * moving, moving, least)


class WholeStepBound(StepTimeBound):
    """The relaxation of forward and backward, with optimizer state and the time of updates added."""

    def __init__(self, graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        kept = [op.id for op in graph.ops if op.phase is not Phase.UPDATE]
        rest = without_updates(graph, kept)
        end = Op(len(kept), "end", "", LayerType.OTHER, Phase.UPDATE, (), ())
        self.updates = _Updates(graph, kept, seconds, rest)
        super().__init__(
            StepProgram(replace(rest, ops=(*rest.ops, end))), device, budget_bytes, [*(seconds[op] for op in kept), 0.0]
        )

    def _sample_points(self, count: int) -> list[int]:
        return sorted({*super()._sample_points(count), self.program.length - 1})

    def _visiting_bytes(self) -> int:
        return sum(self.updates.state.values())

    def _visit(self, leaving: Transfers, coming: Transfers, busy: Transfers) -> Transfers:
        ready: dict[int, float] = defaultdict(float)
        for op, longer in self.updates.seconds.items():
            ready[self._interval_of(op)] += longer / self.total
        for first, longer in ready.items():
            columns = {k: self.lp.variable() for k in range(first, len(self.at))}
            self.lp.row([(column, 1.0) for column in columns.values()], lower=longer)
            for k, column in columns.items():
                if k < 0:
                    self.time.beyond([(column, 1.0)], *self._interval(k))
                else:
                    busy[k].append((column, 1.0))
        sizes: dict[tuple[int, int | None], int] = defaultdict(int)
        for (last, written), nbytes in self.updates.state.items():
            sizes[self._interval_of(last), None if written is None else self._interval_of(written)] += nbytes
        away: Transfers = defaultdict(list)
        for (last, written), nbytes in sizes.items():
            self._visitors(last, written, nbytes / self.unit, away, leaving, coming)
        return away

    def _visitors(
        self, last: int, written: int | None, size: float, away: Transfers, leaving: Transfers, coming: Transfers
    ) -> None:
        """Add tensors whose last use may be in the interval `last` or later, and last write in `written` or later."""
        lp, count = self.lp, len(self.at)
        stored = lp.variable(size)
        sooner: Terms = []  # copies of any time so far, and of values after the last write
        later: Terms = []
        before = stored
        after: int | None = None
        for k in range(-1, count):
            if k >= 0:
                # At sample point k: what is away before its last use, and after it.
                came, now = lp.variable(), lp.variable(size)
                lp.row([(now, 1.0), (before, -1.0), (came, 1.0)], lower=0.0)
                coming[k - 1].append((came, 1.0))
                both, before = [(now, 1.0)], now
                if written is not None:
                    lp.row([(now, 1.0), (stored, -1.0), *((c, -1.0) for c, _ in (*sooner, *later))], upper=0.0)
                if k > last:
                    came, now = lp.variable(), lp.variable(size)
                    lp.row([(now, 1.0), (came, 1.0), *minus(after)], lower=0.0)
                    coming[k - 1].append((came, 1.0))
                    both, after = [*both, (now, 1.0)], now
                    if written is not None:
                        lp.row([(now, 1.0), *((c, -1.0) for c, _ in later)], upper=0.0)
                    lp.row(both, upper=size)
                away[k] += both
            # Copies in the interval that begins here.
            if written is not None:
                made = lp.variable()
                leaving[k].append((made, 1.0))
                (sooner if k < written else later).append((made, 1.0))
        # At the end of the step all that was away before its last use is back, and what is stored is away after it.
        came = lp.variable()
        lp.row([(came, 1.0), (before, -1.0)], lower=0.0)
        coming[count - 1].append((came, 1.0))
        came = lp.variable()
        lp.row([(stored, 1.0), (came, 1.0), *minus(after)], lower=0.0)
        coming[count - 1].append((came, 1.0))
        if written is not None:
            lp.row([(stored, 1.0), *((c, -1.0) for c, _ in later)], upper=0.0)


class _Updates:
    """Time and tensors of updates, by the op of the rest after which they can run at the soonest; -1: before all."""

    def __init__(self, graph: Graph, kept: Sequence[int], seconds: Sequence[float], rest: Graph) -> None:
        place = {op: number for number, op in enumerate(kept)}
        ready: dict[int, int] = dict.fromkeys(range(len(graph.ops)), -1)
        for earlier, later in followers_of(graph.ops).items():
            for follower in later:
                ready[follower] = max(ready[follower], place.get(earlier, ready[earlier]))
        self.seconds: dict[int, float] = defaultdict(float)
        for op in graph.ops:
            if op.id not in place:
                self.seconds[ready[op.id]] += seconds[op.id]
        self.state: dict[tuple[int, int | None], int] = defaultdict(int)  # by last use and last write
        for tensor in graph.tensors:
            if tensor.persistent and not rest.tensors[tensor.id].persistent:
                users, writers = graph.uses[tensor.id], graph.written_by[tensor.id]
                if users:
                    written = ready[writers[-1]] if writers else None
                    self.state[max(ready[user] for user in users), written] += tensor.nbytes


def without_updates(graph: Graph, kept: Sequence[int]) -> Graph:
    """Return the ops `kept` of `graph`, without persistent tensors that only others use, unless immovable."""
    used = {t for op in kept for t in (*graph.ops[op].reads, *graph.ops[op].writes)}
    tensors = (replace(t, persistent=t.persistent and (t.id in used or not t.movable)) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors), ops=numbered(graph.ops[op] for op in kept))


def forced_link_seconds(graph: Graph, device: Device, budget_bytes: int) -> float:
    """Return the least seconds for which the link's busier direction is in use.

    On a half-duplex link it is the link itself.
    """
    program = StepProgram(graph)
    tensors = graph.tensors
    away_somewhere = {gap.tensor for gap in swappable_gaps(program)}
    moving = {t.id: t.nbytes for t in tensors if t.persistent and t.id in away_somewhere}
    fixed = sum(t.nbytes for t in tensors if t.persistent and not t.movable)
    total, away = sum(moving.values()), 0
    # Most bytes that must be away at some op.
    for op in graph.ops:
        own = dict.fromkeys((*op.reads, *op.writes))
        others = total - sum(moving.get(t, 0) for t in own)
        needed = sum(tensors[t].nbytes for t in own if tensors[t].movable or not tensors[t].persistent)
        least = min((a.workspace_bytes for a in op.algorithms), default=op.workspace_bytes)
        away = max(away, min(others, fixed + needed + least + others - budget_bytes))
    constant = sum(nbytes for t, nbytes in moving.items() if not program.written[t])
    return device.link_seconds(max(0, away - constant), away)
