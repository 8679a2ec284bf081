"""The search of `auto`: from rounded relaxations to the best plan that a fixed effort finds, deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from overspill.core import Device, Schedule

from .algorithms import memory_optimal
from .base import possible_trips, saved_gaps
from .changes import Changes, Decision
from .checkpoint import dropped_sets
from .decoding import Decoded, Decoder, Decoders, GapKeys, Seconds, gap_keys
from .hint import Hinting
from .program import Program

GOOD_ENOUGH = 1.002
"""A plan within this factor of the ops' own time is not worth another attempt."""
SHARES = (1.0, 0.95, 0.85, 0.7)
"""How much of what the budget leaves beside the least is used where the relaxation is asked for a hint."""
THRESHOLDS = (0.5, 0.05, 0.95)
"""What the relaxation recomputes by more than this, the plan recomputes."""
MOSTLY = 0.5
"""What the relaxation moves by more than this, the plan moves."""
MOST_FORCED = 250
"""With more trips than these that a step without room for the tensor forces, the relaxation is large and no help."""
REPAIRS = 3
"""How often a plan that waits for transfers is made again with other transfers."""
EFFORT = 7_000_000
"""How often candidates are looked at in all attempts, so that planning takes up to two seconds on one core."""
HINT = 0.43
"""The share of this that the relaxation takes, and that a whole step, which is planned three times, goes without."""
LONG_STEP = 1000
LESS = 0.2
"""The share that steps of more ops go without, for which an attempt takes longer than the looks that it counts."""
LOOKS_PER_OP = 3
"""What an attempt costs beside for each op of the graph, in looks at candidates, and at the least."""
LEAST_LOOKS = 600
ATTEMPTS_EACH = 64
"""How many attempts there are at most for each tensor that may be recomputed."""
STEERING = 0.05
"""To one other change of a plan, how many steer what moves and what takes slower algorithms."""
MORE_EFFORT = 9_000_000
MOST_OPS = 500
"""Where that leaves effort, or a step has no more ops than these, a second search goes on from the best plan …"""
MORE_ATTEMPTS_EACH = 160
MORE_STEERING = 0.3
"""… with as many attempts, more of which steer."""
ATTEMPTS_IF_BRIEF = 8
SMALL = 0.001
"""Outputs of an op below this share of the budget are not worth a change of their own."""
KEEPING = 0.9
"""How often, where another thing is recomputed, what moves stays as it is but for what that makes necessary."""
TEMPERATURE = 0.001
"""The share of the ops' own time that a change may cost at first, on average; it falls to none (simulated annealing)."""


@dataclass(frozen=True)
class Attempt:
    """A plan that fits, and the decision that it comes from; `lost` seconds are counted as `Decision.dearer` is."""

    decision: Decision
    decoder: Decoder
    plan: Decoded
    lost: Seconds
    program: Program
    budget_bytes: int

    @property
    def cost(self) -> tuple[float, int]:
        """What is to be made small: seconds, then bytes moved."""
        return self.plan.cost

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step."""
        return self.plan.seconds

    def schedule(self, policy: str) -> Schedule:
        """The schedule of this plan."""
        chosen = self.decision
        program = Program(self.program.graph, chosen.recompute, self.program.algorithms, chosen.fleeting)
        return self.decoder.schedule(self.plan, program, policy, self.budget_bytes)


@dataclass
class Search:
    """The search for the fastest step of `program` within a budget, which at least one plan keeps.

    `brief`: it is one of many, and makes do without the relaxation's hint and with few attempts. `patience`: how many
    times as long as the second search a third may take.
    """

    program: Program
    device: Device
    budget_bytes: int
    seconds: Sequence[float]
    brief: bool = False
    patience: int = 0
    effort: int = field(default=0, init=False)
    attempts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.graph = self.program.graph
        self.decoders = Decoders(self.program, self.device, self.seconds, self.budget_bytes)
        self.nowhere = np.zeros(len(self.graph.tensors) + len(self.graph.ops))

    def best(self) -> Attempt:
        """The best attempt; there is always one, for without recomputation the least fits."""
        best: Attempt | None = None
        aim = GOOD_ENOUGH * sum(self.seconds)
        for recompute, away in self._starts():
            best = self._repaired(best, recompute, away)
            if best is not None and best.seconds <= aim:
                break
        assert best is not None
        return self._improved(best, aim)

    # -- where to start

    @cached_property
    def droppable(self) -> list[int]:
        """Saved tensors that may be recomputed, in the order of their making."""
        graph = self.graph
        found = (t for t in saved_gaps(self.program) if t in graph.ops[graph.producer[t]].recompute_writes)
        return sorted(found, key=lambda t: (graph.producer[t], t))

    def _starts(self) -> Iterator[tuple[frozenset[int], GapKeys]]:
        """What to recompute and what to move first: nothing, the relaxation's roundings, what checkpoints drop."""
        unhinted = gap_keys(self.program, ())
        yield frozenset(), unhinted
        hinted = not self.brief and self._has_room
        if hinted or self.graph.whole_step:
            self.effort += int(HINT * EFFORT)
        elif len(self.graph.ops) > LONG_STEP:
            self.effort += int(LESS * EFFORT)
        relaxation = Hinting(self.program, self.device, self.budget_bytes, self.seconds) if hinted else None
        for share in SHARES:
            if relaxation is None or (relaxed := relaxation.solve(share)) is None:
                continue
            away = gap_keys(self.program, (gap for gap, part in relaxed.away.items() if part > MOSTLY))
            for threshold in THRESHOLDS:
                yield self._rounded(relaxed.recompute, threshold), away
        for dropped in dropped_sets(self.graph, self.seconds):
            yield frozenset(dropped), unhinted

    @property
    def _has_room(self) -> bool:
        """Whether most trips are left to choose, and not forced by a step that has no room for the tensor."""
        least = self.program.with_algorithms(memory_optimal(self.graph))
        trips = possible_trips(least)
        room = self.budget_bytes - least.live_bytes(trips)
        inside = (
            room[gap.start + 1 : gap.end].min() < self.graph.tensors[gap.tensor].nbytes
            for gap in trips
            if not gap.wraps
        )
        return sum(inside) <= MOST_FORCED

    def _rounded(self, recompute: Mapping[int, float], threshold: float) -> frozenset[int]:
        """The saved tensors whose ops the relaxation runs again by more than `threshold`."""
        producer = self.graph.producer
        return frozenset(t for t in self.droppable if recompute.get(producer[t], 0.0) > threshold)

    def _repaired(self, best: Attempt | None, recompute: frozenset[int], away: GapKeys) -> Attempt | None:
        """The better of `best` and several plans, each of which avoids the stalls and slow algorithms of the one before."""
        decision = Decision(recompute, frozenset(), self.nowhere, away)
        before: Attempt | None = None
        for _ in range(REPAIRS):
            attempt = self._attempt(decision)
            if attempt is None or (before is not None and attempt.cost >= before.cost):
                break
            before = attempt
            best = attempt if best is None or attempt.cost < best.cost else best
            if not attempt.lost.any():
                break
            decision = Decision(attempt.decision.recompute, frozenset(), decision.dearer + attempt.lost, away)
        return best

    # -- the local search

    def _improved(self, best: Attempt, aim: float) -> Attempt:
        """The best plan after changes drawn at random; where planning is quick, again from there, with more steering."""
        best = self._annealed(best, aim, ATTEMPTS_IF_BRIEF if self.brief else ATTEMPTS_EACH, EFFORT)
        if self.brief:
            return best
        # A whole step is planned three times (`order.py`), which is long enough.
        if not self.graph.whole_step and (self.effort < EFFORT or len(self.graph.ops) <= MOST_OPS):
            best = self._annealed(best, aim, MORE_ATTEMPTS_EACH, MORE_EFFORT, MORE_STEERING)
        if self.patience:
            each, effort = self.patience * MORE_ATTEMPTS_EACH, self.patience * MORE_EFFORT
            best = self._annealed(best, aim, each, effort, MORE_STEERING)
        return best

    def _annealed(self, best: Attempt, aim: float, each: int, effort: int, steering: float = STEERING) -> Attempt:
        """The best plan after changes drawn with a fixed seed, of which early ones may cost a little."""
        random = np.random.default_rng(0)
        changes = Changes(self.graph, self.device, self._units, self.seconds, steering, random)
        begun, first, most = self.effort, self.attempts, each * (1 + len(self.droppable))
        warm = TEMPERATURE * sum(self.seconds)
        current = best
        while self.effort < effort and self.attempts < first + most and best.seconds > aim:
            left = min((effort - self.effort) / (effort - begun), 1 - (self.attempts - first) / most)
            decision = changes.of(current.decision, current.lost)
            keeps = decision.steers_like(current.decision) and random.random() < KEEPING
            attempt = self._attempt(decision, current, current if keeps else None)
            if attempt is None:
                continue
            if attempt.seconds <= current.seconds + warm * left**2 * random.exponential():
                current = attempt
            best = attempt if attempt.cost <= best.cost else best
        return best

    @property
    def _units(self) -> list[frozenset[int]]:
        """What is recomputed together: the saved outputs of an op, but not those that are too small to matter."""
        by_op: dict[int, list[int]] = defaultdict(list)
        for tensor in self.droppable:
            by_op[self.graph.producer[tensor]].append(tensor)
        least = SMALL * self.budget_bytes
        large = [u for u in by_op.values() if sum(self.graph.tensors[t].nbytes for t in u) >= least]
        return [frozenset(unit) for unit in large or by_op.values()]

    def _attempt(self, decision: Decision, near: Attempt | None = None, kept: Attempt | None = None) -> Attempt | None:
        """The plan that a decision leads to; None where it does not fit. `near` may have the same program.

        The trips of `kept` are made but for those that are superfluous, others only where these leave too little room.
        """
        self.attempts += 1
        if near is not None and near.decision.same_program(decision):
            decoder: Decoder | None = near.decoder
        else:
            decoder = self.decoders.fitting(decision.recompute, decision.fleeting)
        if decoder is None:
            return None
        first = decoder.as_chosen(kept.decoder, kept.plan) if kept else decoder.among(decision.away)
        plan = decoder.decode(decision.dearer[decoder.keys], first)
        self.effort += plan.looks + LOOKS_PER_OP * len(self.graph.ops) + LEAST_LOOKS
        lost = self.nowhere.copy()
        lost[decoder.keys] = plan.lost
        return Attempt(decision.recomputing(decoder.recompute), decoder, plan, lost, self.program, self.budget_bytes)
