"""The walk of the search of `auto` from plan to plan, which keeps the best.

Twin of native/planning/walk.hpp, which makes the same attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from overspill.core import Device

from . import twin
from .changes import Changes, Decision
from .decoding import Flags, GapKeys, gap_keys
from .program import Program
from .randoms import Random
from .trips import candidates
from .twin import TwinPlan
from .units import Units, most_dearer

REPAIRS = 3
"""How often a plan that waits for transfers is made again with other transfers."""
KEEPING = 0.9
"""How often, where another thing is recomputed, what moves stays as it is but for what that makes necessary."""


@dataclass(frozen=True)
class Attempt:
    """A plan that fits, and the decision that it comes from."""

    decision: Decision
    program: Program
    plan: TwinPlan


class Walk:
    """From plan to plan of one program, under a budget."""

    def __init__(
        self, program: Program, device: Device, seconds: Sequence[float], budget_bytes: int, units: Units
    ) -> None:
        self.program, self.device, self.seconds, self.budget_bytes = program, device, seconds, budget_bytes
        self.units, self.most_dearer = units, most_dearer(program.graph, device, seconds)
        self.best: Attempt | None = None

    def begin(self, recompute: Collection[int], away: GapKeys) -> None:
        """Where to walk from: several plans, each of which avoids the stalls and slow algorithms of the one before."""
        decision = Decision(frozenset(recompute), frozenset(), np.zeros(len(self.most_dearer)), away)
        before: Attempt | None = None
        for _ in range(REPAIRS):
            attempt = self._attempt(decision)
            if attempt is None or (before is not None and attempt.plan.cost >= before.plan.cost):
                break
            before = attempt
            if self.best is None or attempt.plan.cost < self.best.plan.cost:
                self.best = attempt
            if not attempt.plan.lost.any():
                break
            dearer = decision.dearer + attempt.plan.lost
            decision = Decision(attempt.decision.recompute, frozenset(), dearer, away)

    def go_on(self, most: int, steering: float, warm: float, aim: float) -> None:
        """From the best plan on by `most` changes drawn with a fixed seed, of which early ones may cost about `warm` seconds.

        It ends with a plan that takes `aim` seconds. The native walk counts its looks at candidates as well, and may end by that.
        """
        assert self.best is not None
        random = Random(0)
        changes = Changes(self.units, self.most_dearer, steering, random)
        current = self.best
        for made in range(most):
            if self.best.plan.seconds <= aim:
                break
            left = 1 - made / most
            decision = changes.of(current.decision, current.plan.lost)
            keeps = decision.steers_like(current.decision) and random.uniform() < KEEPING
            attempt = self._attempt(decision, current if keeps else None)
            if attempt is None:
                continue
            if attempt.plan.seconds <= current.plan.seconds + warm * (left * left) * random.exponential():
                current = attempt
            if attempt.plan.cost <= self.best.plan.cost:
                self.best = attempt

    def _attempt(self, decision: Decision, kept: Attempt | None = None) -> Attempt | None:
        """The plan that a decision leads to; None where it does not fit.

        The trips of `kept` are made but for those that are superfluous, others only where these leave too little room.
        """
        found = twin.fitting(self.program, decision.recompute, decision.fleeting, self.budget_bytes)
        if found is None:
            return None
        program, recompute = found
        first = self._among(program, decision.away) if kept is None else self._as_chosen(program, kept)
        plan = twin.decode(program, self.device, self.seconds, self.budget_bytes, decision.dearer, first)
        return Attempt(decision.recomputing(recompute), program, plan)

    def _among(self, program: Program, away: GapKeys) -> Flags:
        among = candidates(program, self.device, self.seconds)
        gaps = set(away.tolist())
        return np.array([c.gap is not None and int(gap_keys(program, [c.gap])[0]) in gaps for c in among], dtype=bool)

    def _as_chosen(self, program: Program, kept: Attempt) -> Flags:
        among = candidates(kept.program, self.device, self.seconds)
        chosen = {(kept.program.ends(c.gap), c.part) for c in (among[i] for i in kept.plan.chosen) if c.gap}
        now = candidates(program, self.device, self.seconds)
        return np.array([c.gap is not None and (program.ends(c.gap), c.part) in chosen for c in now], dtype=bool)
