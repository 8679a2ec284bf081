"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph, Schedule, Verb
from overspill.core.errors import InfeasibleBudget
from overspill.simulate import simulate

from .algorithms import memory_optimal
from .assemble import assemble
from .base import Policy, possible_trips, saved_gaps
from .candidates import fastest
from .checkpoint import CheckpointCost
from .floor import algorithms_within, infeasible
from .hint import Hinting
from .order import best_order
from .program import Program
from .relaxation import Relaxed
from .select import Choices
from .superneurons import Superneurons
from .timing import Seconds, timed
from .trips import candidates
from .window import Window

GOOD_ENOUGH = 1.005
"""A plan within this factor of the relaxation's bound is not worth another attempt."""
SHARES = (1.0, 0.95, 0.85, 0.7)
"""How much of what the budget leaves beside the least is used where the relaxation is asked for a hint."""
THRESHOLDS = (0.5, 0.05, 0.95)
"""What the relaxation recomputes by more than this, the plan recomputes."""
MOSTLY = 0.5
"""What the relaxation moves by more than this, the plan moves."""
NEAR = 1.01
"""Up to this factor of the ops' own time, a plan is measured against one that only moves."""
REPAIRS = 3
"""How often a plan that waits for transfers is made again with other transfers."""
ROUNDING_SHARE = 0.5
"""The share of the effort after which no further rounding of the relaxation is tried."""
EFFORT_STEPS = 12_000
"""Steps of schedules that are tried: attempts times the length of the program, so that planning takes about a second."""
MOST_ATTEMPTS = 64
"""How many attempts a short program gets."""


class Auto(Policy):
    """Relax, round, repair: a linear program says what to recompute and what to move, the clock what that costs.

    The relaxation (`relaxation.py`) is solved for the budget and for somewhat less, and rounded at several thresholds.
    Each rounding gives the tensors to recompute; a greedy choice completes the transfers and slower algorithms that
    the budget still demands; transfers start as late as they can without a stall, memory permitting (vDNN §III-B gives
    both rules their reason). What a transfer exposes shows only on the clock: a plan that stalls is made again, with
    the stalls of each tensor added to the cost of moving it, and finally with single tensors recomputed or not. The
    fastest of these and of the papers' policies that come nearest is taken, of equals the one that moves less.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        if not graph.whole_step:
            return self._in_order(graph, device, budget_bytes, seconds)
        return best_order(self._in_order, graph, device, budget_bytes, seconds)

    def _in_order(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = Program(graph)
        if budget_bytes is None or program.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        least = program.with_algorithms(memory_optimal(graph))
        if least.live_bytes(possible_trips(least)).max(initial=0) > budget_bytes:
            raise infeasible(least, budget_bytes, self.name)
        program = program.with_algorithms(algorithms_within(program, budget_bytes))
        ours = _Planner(program, device, budget_bytes, seconds).best()
        schedules = [ours.schedule, *_rivals(graph, device, budget_bytes, seconds, ours.seconds)]
        best = fastest(graph, device, seconds, schedules, budget_bytes)
        assert best is not None
        return replace(best, policy=self.name)


def _rivals(
    graph: Graph, device: Device, budget_bytes: int, seconds: tuple[float, ...], took: float
) -> Iterator[Schedule]:
    """The schedules of the papers' policies that come nearest to a plan that `took` so many seconds.

    Where hardly anything is lost, that is the one that moves without a stall; else those that recompute.
    """
    least = sum(seconds)
    if took <= least * (1 + 1e-9):
        return
    for rival in (Window(),) if took <= NEAR * least else (Superneurons(), CheckpointCost()):
        with suppress(InfeasibleBudget):
            yield rival._plan(graph, device, budget_bytes, seconds)


@dataclass(frozen=True)
class _Remade:
    """Tensors to recompute, and those among them to drop again as soon as the op that wanted them has run."""

    tensors: frozenset[int] = frozenset()
    fleeting: frozenset[int] = frozenset()

    def toggled(self, *tensors: int) -> _Remade:
        """Without those of `tensors` that are recomputed, and with the others."""
        changed = self.tensors ^ frozenset(tensors)
        return _Remade(changed, self.fleeting & changed)

    def shortened(self, tensor: int) -> _Remade:
        """With `tensor` recomputed for every use, or no longer."""
        return _Remade(self.tensors, self.fleeting ^ {tensor})


@dataclass(frozen=True)
class _Hint:
    """What a relaxation moves: for a gap, by its tensor and the ops at its ends, the share of its group that is away."""

    away: Mapping[tuple[int, int, int], float]

    @classmethod
    def of(cls, program: Program, relaxed: Relaxed | None) -> _Hint | None:
        """The hint of a relaxation of `program`, if it has a solution."""
        return None if relaxed is None else cls({program.ends(gap): share for gap, share in relaxed.away.items()})


class _Ground:
    """A program with the candidates for it, and which of them a hint takes."""

    def __init__(self, program: Program, device: Device, seconds: Sequence[float], hint: _Hint | None) -> None:
        self.program = program
        self.hint = hint
        self.live = program.live_bytes()
        self.choices = Choices(candidates(program, device, seconds), program.durations(seconds), program.end_of_forward)
        away = hint.away if hint is not None else {}
        among = self.choices.candidates
        self.hinted = np.array(
            [c.gap is not None and away.get(program.ends(c.gap), 0.0) > MOSTLY for c in among], dtype=bool
        )
        # Whose loss a candidate is: its tensor's, or minus one minus its op's.
        self.keys = [c.gap.tensor if c.gap is not None else -1 - program.steps[c.position].op for c in among]

    def lost(self, attempt: _Attempt) -> Seconds:
        """For each candidate, the seconds that its tensor or op has lost in `attempt`."""
        return np.array([attempt.lost.get(key, 0.0) for key in self.keys])


@dataclass(frozen=True)
class _Attempt:
    """A schedule that fits, what it recomputes, and its simulated seconds with the bytes that it moves.

    `lost` are seconds: by tensor, those that compute waited for it; by -1 minus an op, those of its slower algorithm.
    """

    schedule: Schedule
    remade: _Remade
    cost: tuple[float, int]
    lost: Mapping[int, float]
    ground: _Ground

    @property
    def seconds(self) -> float:
        return self.cost[0]


@dataclass
class _Planner:
    program: Program
    device: Device
    budget_bytes: int
    seconds: tuple[float, ...]
    seen: dict[_Remade, _Attempt | None] = field(default_factory=dict)
    effort: int = 0

    @cached_property
    def droppable(self) -> frozenset[int]:
        """Saved tensors that may be recomputed."""
        graph = self.program.graph
        saved = saved_gaps(self.program)
        return frozenset(t for t in saved if t in graph.ops[graph.producer[t]].recompute_writes)

    def best(self) -> _Attempt:
        """The best attempt; there is always one, for without recomputation the least fits."""
        relaxation = Hinting(self.program, self.device, self.budget_bytes, self.seconds)
        bound = relaxation.solve()
        aim = GOOD_ENOUGH * max(sum(self.seconds), bound.seconds if bound else 0.0)
        best = self._attempt(_Remade(), _Hint.of(self.program, bound))
        assert best is not None
        for share in SHARES:
            relaxed = bound if share == SHARES[0] else relaxation.solve(share)
            hint = _Hint.of(self.program, relaxed)
            for recompute in self._roundings(relaxed):
                if self.effort < ROUNDING_SHARE * EFFORT_STEPS or share == SHARES[0]:
                    best = self._better(best, _Remade(recompute), hint)
            if best.seconds <= aim:
                return best
        every_use = _Remade(best.remade.tensors, best.remade.tensors)
        best = self._better(best, every_use, best.ground.hint)
        for improve in (self._refined, self._toggled, self._perturbed):
            best = improve(best, aim)
        return best

    def _better(self, best: _Attempt, remade: _Remade, hint: _Hint | None) -> _Attempt:
        """The better of `best` and the attempt to recompute these."""
        attempt = self._attempt(remade, hint)
        return attempt if attempt is not None and attempt.cost < best.cost else best

    def _refined(self, best: _Attempt, aim: float) -> _Attempt:
        """`best` with other transfers: as the relaxation finds them when it knows the steps that recompute."""
        program = best.ground.program
        relaxation = Hinting(program, self.device, self.budget_bytes, self.seconds)
        for share in SHARES:
            if best.seconds <= aim or self.effort >= EFFORT_STEPS:
                break
            if (hint := _Hint.of(program, relaxation.solve(share))) is not None:
                attempt = self._repaired(program, best.remade, hint)
                best = attempt if attempt.cost < best.cost else best
        return best

    def _perturbed(self, best: _Attempt, aim: float) -> _Attempt:
        """`best` with other costs of the candidates, drawn at random (with a fixed seed), as long as effort is left."""
        random = np.random.default_rng(0)
        while self.effort < EFFORT_STEPS and best.seconds > aim:
            remade, ground = best.remade, best.ground
            if self.droppable and (kind := random.random()) < 0.5:
                changed = random.choice(sorted(self.droppable), size=1 + int(random.integers(2)))
                remade = remade.toggled(*(int(t) for t in changed))
            elif remade.tensors and kind < 0.7:
                remade = remade.shortened(int(random.choice(sorted(remade.tensors))))
            if remade != best.remade:
                remade, program = self._fitting(remade)
                if program is None:
                    self._spend(self.program)
                    continue
                ground = _Ground(program, self.device, self.seconds, best.ground.hint)
            choices = ground.choices
            dearer = random.random() * ground.lost(best) + random.random() * random.random(len(choices.cost)) * (
                choices.out + choices.back
            )
            first = ground.hinted & (random.random(len(choices.cost)) < random.random() + 0.5)
            attempt = self._simulated(ground, remade, dearer, first)
            best = attempt if attempt.cost < best.cost else best
        return best

    def _roundings(self, hint: Relaxed | None) -> Iterator[frozenset[int]]:
        """What to recompute: the saved tensors whose ops the relaxation runs again by more than a threshold."""
        if hint is None:
            return
        graph = self.program.graph
        for threshold in THRESHOLDS:
            yield frozenset(
                tensor for tensor in self.droppable if hint.recompute.get(graph.producer[tensor], 0.0) > threshold
            )

    def _toggled(self, best: _Attempt, aim: float) -> _Attempt:
        """Better attempts, each with one change of what is recomputed that concerns a tensor which stalls."""
        improved = True
        while improved and best.seconds > aim:
            improved = False
            for remade in self._changes(best):
                if remade in self.seen:
                    continue
                if self.effort >= EFFORT_STEPS:
                    return best
                attempt = self._attempt(remade, best.ground.hint)
                if attempt is not None and attempt.cost < best.cost:
                    best, improved = attempt, True
                    break
        return best

    def _changes(self, attempt: _Attempt) -> Iterator[_Remade]:
        """For the tensors that stall most: recompute them as well, or for every use, or no longer, or what needs them.

        And no longer recompute what takes most time. First many at once, then one by one.
        """
        graph, stalls, remade = self.program.graph, attempt.lost, attempt.remade
        stalled = sorted((t for t in stalls if t >= 0 and stalls[t] > 0.0), key=lambda t: (-stalls[t], t))
        droppable = [t for t in stalled if t in self.droppable and t not in remade.tensors]
        share = len(droppable)
        while share > 1:
            yield remade.toggled(*droppable[:share])
            share //= 2
        dearest = sorted(remade.tensors, key=lambda t: (-self.seconds[graph.producer[t]], t))
        share = len(dearest)
        while share > 1:
            share //= 2
            yield remade.toggled(*dearest[:share])
        for tensor in stalled:
            if stalls[tensor] < (GOOD_ENOUGH - 1) * sum(self.seconds):
                break
            if tensor in self.droppable:
                if tensor in remade.tensors:
                    yield remade.shortened(tensor)
                yield remade.toggled(tensor)
            readers = {t for t in remade.tensors if tensor in graph.ops[graph.producer[t]].recompute_reads}
            if readers:
                yield remade.toggled(*readers)
        for tensor in dearest:
            yield remade.toggled(tensor)

    # -- one attempt

    def _spend(self, program: Program) -> None:
        """Count an attempt with `program`."""
        self.effort += max(program.length, EFFORT_STEPS // MOST_ATTEMPTS)

    def _attempt(self, remade: _Remade, hint: _Hint | None) -> _Attempt | None:
        """The best plan that recomputes these tensors, or as many of them as fit where they are made again."""
        if remade not in self.seen:
            fitting, program = self._fitting(remade)
            self.seen[remade] = None if program is None else self._repaired(program, fitting, hint)
        return self.seen[remade]

    def _fitting(self, remade: _Remade) -> tuple[_Remade, Program | None]:
        """The program that recomputes these, less those for which there is no room where they are made again."""
        graph = self.program.graph
        choice = memory_optimal(graph)
        while True:
            program = self.program
            if remade.tensors:
                program = Program(graph, remade.tensors, self.program.algorithms, remade.fleeting)
            least = program.with_algorithms(choice)
            over = least.live_bytes(possible_trips(least)) > self.budget_bytes
            if not over.any():
                return remade, program
            if not remade.tensors:
                return remade, None
            around = {p + d for p in np.flatnonzero(over).tolist() for d in (-1, 0, 1)}
            crowded = {g.tensor for g in program.gaps if g.remade and g.end in around} & remade.tensors
            remade = remade.toggled(*(crowded or remade.tensors))

    def _repaired(self, program: Program, remade: _Remade, hint: _Hint | None) -> _Attempt:
        """The best of several plans, each of which avoids the stalls and slow algorithms of the one before."""
        ground = _Ground(program, self.device, self.seconds, hint)
        penalty = np.zeros(len(ground.choices.candidates))
        best: _Attempt | None = None
        for _ in range(REPAIRS):
            attempt = self._simulated(ground, remade, penalty, ground.hinted & (penalty == 0.0))
            if best is not None and attempt.cost >= best.cost:
                break
            best = attempt
            if sum(attempt.lost.values()) <= (GOOD_ENOUGH - 1) * attempt.seconds or self.effort >= EFFORT_STEPS:
                break
            penalty += ground.lost(attempt)
        assert best is not None
        return best

    def _simulated(self, ground: _Ground, remade: _Remade, dearer: Seconds, first: NDArray[np.bool_]) -> _Attempt:
        program, graph = ground.program, self.program.graph
        self._spend(program)
        schedule = self._schedule(ground, dearer, first)
        timeline = simulate(graph, schedule, self.device, self.seconds)
        lost: dict[int, float] = defaultdict(float)
        for stall in timeline.stalls:
            lost[schedule.instructions[stall.instruction].target] += stall.end_seconds - stall.start_seconds
        for i in schedule.instructions:
            if i.algorithm and i.algorithm > (least := program.algorithms.get(i.target, 0)):
                op = graph.ops[i.target]
                lost[-1 - op.id] += self.seconds[op.id] * (op.slowdown_of(i.algorithm) - op.slowdown_of(least))
        moved = sum(graph.tensors[t].nbytes for t in schedule.targets(Verb.OFFLOAD))
        return _Attempt(schedule, remade, (timeline.step_seconds, moved), lost, ground)

    def _schedule(self, ground: _Ground, dearer: Seconds, first: NDArray[np.bool_]) -> Schedule:
        program = ground.program
        chosen = ground.choices.select(ground.live, self.budget_bytes, np.flatnonzero(first), dearer)
        algorithms = dict(program.algorithms)
        for candidate in chosen:
            if candidate.gap is None:
                op = program.steps[candidate.position].op
                algorithms[op] = max(algorithms.get(op, 0), candidate.algorithm)
        gaps = list(dict.fromkeys(c.gap for c in chosen if c.gap))
        program = program.with_algorithms(algorithms)
        transfers = timed(program, gaps, program.live_bytes(gaps), self.seconds, self.device, self.budget_bytes)
        return assemble(program, transfers, Auto.name, self.budget_bytes)
