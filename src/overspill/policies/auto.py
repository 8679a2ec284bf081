"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from overspill.core import Device, Graph, Schedule, Verb
from overspill.simulate import simulate

from .algorithms import memory_optimal
from .assemble import assemble
from .base import Policy, may_leave, saved_gaps
from .floor import infeasible
from .program import Gap, Program
from .relaxation import Relaxation, Relaxed
from .select import Candidate, select
from .timing import timed

GOOD_ENOUGH = 1.005
"""A plan within this factor of the relaxation's bound is not worth another attempt."""
SHARES = (1.0, 0.95, 0.85, 0.7)
"""How much of what the budget leaves beside the least is used where the relaxation is asked for a hint."""
THRESHOLDS = (0.5, 0.05, 0.95)
"""What the relaxation recomputes by more than this, the plan recomputes."""
REPAIRS = 3
"""How often a plan that waits for transfers is made again with other transfers."""
TOGGLES = 24
"""How many single changes of what is recomputed are tried in the end."""


class Auto(Policy):
    """Relax, round, repair: a linear program says what to recompute and what to move, the clock what that costs.

    The relaxation (`relaxation.py`) is solved for the budget and for somewhat less, and rounded at several thresholds.
    Each rounding gives the tensors to recompute; a greedy choice completes the transfers and slower algorithms that
    the budget still demands; transfers start as late as they can without a stall, memory permitting (vDNN §III-B gives
    both rules their reason). What a transfer exposes shows only on the clock: a plan that stalls is made again, with
    the stalls of each tensor added to the cost of moving it, and finally with single tensors recomputed or not. The
    fastest is taken, of equals the one that moves less.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = Program(graph)
        if budget_bytes is None or program.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        least = program.choosing(memory_optimal(graph))
        if least.live_bytes([g for g in least.gaps if may_leave(least, g)]).max(initial=0) > budget_bytes:
            raise infeasible(least, budget_bytes, self.name)
        return _Planner(program, device, budget_bytes, seconds).best()


@dataclass(frozen=True)
class _Attempt:
    """A schedule that fits, what it recomputes, its simulated seconds, and the seconds that each tensor stalled it."""

    schedule: Schedule
    recompute: frozenset[int]
    cost: tuple[float, int]
    stalls: Mapping[int, float]

    @property
    def seconds(self) -> float:
        return self.cost[0]


@dataclass
class _Planner:
    program: Program
    device: Device
    budget_bytes: int
    seconds: tuple[float, ...]
    seen: dict[frozenset[int], _Attempt | None] = field(default_factory=dict)

    def best(self) -> Schedule:
        """The schedule of the best attempt; there is always one, for without recomputation the least fits."""
        relaxation = Relaxation(self.program, self.device, self.budget_bytes, self.seconds)
        bound = relaxation.solve()
        aim = GOOD_ENOUGH * max(sum(self.seconds), bound.seconds if bound else 0.0)
        best: _Attempt | None = None
        hint: Relaxed | None = bound
        for share in SHARES:
            hint = bound if share == SHARES[0] else relaxation.solve(share)
            for recompute in self._roundings(hint):
                attempt = self._attempt(recompute, hint)
                if attempt is not None and (best is None or attempt.cost < best.cost):
                    best = attempt
            if best is not None and best.seconds <= aim:
                return best.schedule
        none = self._attempt(frozenset(), bound)
        if best is None or (none is not None and none.cost < best.cost):
            best = none
        assert best is not None
        return self._toggled(best, bound, aim).schedule

    def _roundings(self, hint: Relaxed | None) -> Iterator[frozenset[int]]:
        """What to recompute: the saved tensors whose ops the relaxation runs again by more than a threshold."""
        if hint is None:
            return
        graph = self.program.graph
        for threshold in THRESHOLDS:
            yield frozenset(
                tensor
                for tensor in saved_gaps(self.program)
                if tensor in (op := graph.ops[graph.producer[tensor]]).recompute_writes
                and hint.recompute.get(op.id, 0.0) > threshold
            )

    def _toggled(self, best: _Attempt, hint: Relaxed | None, aim: float) -> _Attempt:
        """Better attempts, each with one change of what is recomputed that concerns a tensor which stalls."""
        tried: set[frozenset[int]] = set()
        improved = True
        while improved and best.seconds > aim:
            improved = False
            for recompute in self._changes(best):
                if recompute in tried:
                    continue
                if len(tried) >= TOGGLES:
                    return best
                tried.add(recompute)
                attempt = self._attempt(recompute, hint)
                if attempt is not None and attempt.cost < best.cost:
                    best, improved = attempt, True
                    break
        return best

    def _changes(self, attempt: _Attempt) -> Iterator[frozenset[int]]:
        """For the tensors that stall most: recompute it as well; recompute no longer what is made from it, or itself."""
        graph = self.program.graph
        saved = saved_gaps(self.program)
        for tensor in sorted(attempt.stalls, key=lambda t: -attempt.stalls[t]):
            if attempt.stalls[tensor] < (GOOD_ENOUGH - 1) * sum(self.seconds):
                return
            makes = graph.ops[graph.producer[tensor]] if tensor in graph.producer else None
            if makes is not None and tensor in saved and tensor in makes.recompute_writes:
                yield attempt.recompute ^ {tensor}
            for other in attempt.recompute:
                if tensor in graph.ops[graph.producer[other]].recompute_reads:
                    yield attempt.recompute - {other}

    # -- one attempt

    def _attempt(self, recompute: frozenset[int], hint: Relaxed | None) -> _Attempt | None:
        """The best plan that recomputes these tensors, or as many of them as fit where they are made again."""
        if recompute not in self.seen:
            self.seen[recompute] = self._planned(set(recompute), hint)
        return self.seen[recompute]

    def _planned(self, recompute: set[int], hint: Relaxed | None) -> _Attempt | None:
        graph = self.program.graph
        choice = memory_optimal(graph)
        while True:
            program = Program(graph, recompute) if recompute else self.program
            least = program.choosing(choice)
            over = least.live_bytes([g for g in least.gaps if may_leave(least, g)]) > self.budget_bytes
            if not over.any():
                return self._repaired(program, frozenset(recompute), hint)
            if not recompute:
                return None
            around = {p + d for p in np.flatnonzero(over).tolist() for d in (-1, 0, 1)}
            recompute -= {g.tensor for g in program.gaps if g.remade and g.end in around} or recompute

    def _repaired(self, program: Program, recompute: frozenset[int], hint: Relaxed | None) -> _Attempt:
        """The best of several plans, each of which avoids the transfers that stalled the one before."""
        penalty: dict[int, float] = defaultdict(float)
        best: _Attempt | None = None
        candidates = _candidates(program, self.device, self.seconds)
        for _ in range(REPAIRS):
            attempt = self._simulated(program, recompute, candidates, hint, penalty)
            if best is not None and attempt.cost >= best.cost:
                break
            best = attempt
            if sum(attempt.stalls.values()) <= (GOOD_ENOUGH - 1) * attempt.seconds:
                break
            for tensor, stalled in attempt.stalls.items():
                penalty[tensor] += stalled
        assert best is not None
        return best

    def _simulated(
        self,
        program: Program,
        recompute: frozenset[int],
        candidates: Sequence[Candidate],
        hint: Relaxed | None,
        penalty: Mapping[int, float],
    ) -> _Attempt:
        schedule = self._schedule(program, candidates, hint, penalty)
        graph = program.graph
        timeline = simulate(graph, schedule, self.device, self.seconds)
        stalls: dict[int, float] = defaultdict(float)
        for stall in timeline.stalls:
            stalls[schedule.instructions[stall.instruction].target] += stall.end_seconds - stall.start_seconds
        moved = sum(graph.tensors[t].nbytes for t in schedule.targets(Verb.OFFLOAD))
        return _Attempt(schedule, recompute, (timeline.step_seconds, moved), stalls)

    def _schedule(
        self,
        program: Program,
        candidates: Sequence[Candidate],
        hint: Relaxed | None,
        penalty: Mapping[int, float],
    ) -> Schedule:
        if penalty:
            candidates = [_dearer(c, penalty.get(c.gap.tensor, 0.0)) if c.gap else c for c in candidates]
        first = [] if hint is None else [
            i for i, c in enumerate(candidates)
            if c.gap and not penalty.get(c.gap.tensor) and self._hinted(program, hint, c.gap)
        ]  # fmt: skip
        chosen = select(
            program.live_bytes(), program.durations(self.seconds), candidates, self.budget_bytes,
            program.end_of_forward, first,
        )  # fmt: skip
        algorithms: dict[int, int] = {}
        for c in chosen:
            if c.gap is None:
                op = program.steps[c.position].op
                algorithms[op] = max(algorithms.get(op, 0), c.algorithm)
        gaps = list(dict.fromkeys(c.gap for c in chosen if c.gap))
        program = program.choosing(algorithms)
        live = program.live_bytes(gaps)
        transfers = timed(program, gaps, live, self.seconds, self.device, self.budget_bytes)
        return assemble(program, transfers, Auto.name, self.budget_bytes)

    def _hinted(self, program: Program, hint: Relaxed, gap: Gap) -> bool:
        """Whether the relaxation moves most of what goes with `gap`, which it knows by the ops at its ends."""
        if program is self.program:
            return hint.away.get(gap, 0.0) > 0.5
        return self._by_ops(hint).get(program.ends(gap), 0.0) > 0.5

    def _by_ops(self, hint: Relaxed) -> Mapping[tuple[int, int, int], float]:
        if self._indexed is None or self._indexed[0] is not hint:
            self._indexed = hint, {self.program.ends(gap): share for gap, share in hint.away.items()}
        return self._indexed[1]

    _indexed: tuple[Relaxed, dict[tuple[int, int, int], float]] | None = None


def _candidates(program: Program, device: Device, seconds: Sequence[float]) -> list[Candidate]:
    """Every trip that a tensor may make, and every slower algorithm in place of the next faster one.

    A trip is up to three candidates: while its tensor is away without a stall, while it would still be leaving, and
    while it would already be arriving. The latter two cost the wait for it.
    """
    found = []
    clock = np.concatenate([[0.0], np.cumsum(program.durations(seconds))])
    for gap in program.gaps:
        if may_leave(program, gap):
            nbytes = program.graph.tensors[gap.tensor].nbytes
            out, back = device.offload_seconds(nbytes), device.prefetch_seconds(nbytes)
            disturbed = (out + back) * device.transfer_compute_share
            first, last = gap.start + 1, min(gap.end, program.length)
            gone = int(np.searchsorted(clock, clock[first] + out))
            needed = int(np.searchsorted(clock, clock[last] - back, side="right")) - 1
            away, leaving, arriving = _parts(first, gone, needed, last, program.length, wraps=gap.wraps)
            if away:
                found.append(Candidate(away, nbytes, disturbed, out, back, gap))
            if leaving:
                found.append(Candidate(leaving, nbytes, disturbed + out, 0.0, 0.0, gap))
            if arriving:
                found.append(Candidate(arriving, nbytes, disturbed + back, 0.0, 0.0, gap))
    for position, step in enumerate(program.steps):
        op = program.op(step)
        for number, (one, other) in enumerate(pairwise(op.algorithms), start=1):
            slower = seconds[op.id] * (other.slowdown - one.slowdown)
            saved = one.workspace_bytes - other.workspace_bytes
            span = (position, position + 1)
            found.append(Candidate((span,), saved, slower, position=position, algorithm=number))
    return found


_Spans = tuple[tuple[int, int], ...]


def _parts(first: int, gone: int, needed: int, last: int, length: int, *, wraps: bool) -> tuple[_Spans, _Spans, _Spans]:
    """The steps of a trip: away, leaving, arriving. One too short to be away without a stall is leaving all along."""
    away: _Spans = ()
    leaving: _Spans = ((first, last),)
    arriving: _Spans = ()
    if wraps:
        gone, needed = min(gone, length), max(needed, 0)
        away, leaving, arriving = ((0, needed), (gone, length)), ((first, gone),), ((needed, last),)
    elif gone < needed:
        away, leaving, arriving = ((gone, needed),), ((first, gone),), ((needed, last),)
    return _filled(away), _filled(leaving), _filled(arriving)


def _filled(spans: _Spans) -> _Spans:
    return tuple((start, end) for start, end in spans if start < end)


def _dearer(candidate: Candidate, seconds: float) -> Candidate:
    return candidate if not seconds else replace(candidate, cost_seconds=candidate.cost_seconds + seconds)
