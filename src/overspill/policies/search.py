"""The search of `auto`: from rounded relaxations to the best plan that a fixed effort finds, deterministic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from overspill.core import Device, Schedule

from .algorithms import memory_optimal
from .base import possible_trips, saved_gaps
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
EFFORT = 4_000_000
"""How often candidates are looked at in all attempts, so that planning takes about a second on one core."""
LOOKS_PER_OP = 3
"""What an attempt costs beside for each op of the graph, in looks at candidates, and at the least."""
LEAST_LOOKS = 600
ATTEMPTS_EACH = 16
"""How many attempts there are at most for each tensor that may be recomputed."""
FEW = 8
"""The most neighbours that are changed at once."""


@dataclass(frozen=True)
class Decision:
    """What is left to choose: tensors to recompute, those among them `fleeting`, and what steers the greedy choice.

    `fleeting` are dropped again as soon as the op that wanted them has run. `dearer` are seconds that trips of a tensor
    cost more, by tensor, and behind them those of slower algorithms, by op; trips in the gaps `away` are made first.
    """

    recompute: frozenset[int]
    fleeting: frozenset[int]
    dearer: Seconds
    away: GapKeys


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
    """The search for the fastest step of `program` within a budget, which at least one plan keeps."""

    program: Program
    device: Device
    budget_bytes: int
    seconds: Sequence[float]
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
        relaxation = Hinting(self.program, self.device, self.budget_bytes, self.seconds) if self._has_room else None
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
        """`best` after changes, drawn at random with a fixed seed, of which those that are no loss are kept."""
        random = np.random.default_rng(0)
        changes = _Changes(self, random)
        limit = self.attempts + ATTEMPTS_EACH * (1 + len(self.droppable))
        while self.effort < EFFORT and self.attempts < limit and best.seconds > aim:
            attempt = self._attempt(changes.of(best))
            best = attempt if attempt is not None and attempt.cost <= best.cost else best
        return best

    def _attempt(self, decision: Decision) -> Attempt | None:
        """The plan that a decision leads to; None where it does not fit."""
        self.attempts += 1
        decoder = self.decoders.fitting(decision.recompute, decision.fleeting)
        if decoder is None:
            return None
        plan = decoder.decode(decision.dearer[decoder.keys], decoder.among(decision.away))
        self.effort += plan.looks + LOOKS_PER_OP * len(self.graph.ops) + LEAST_LOOKS
        lost = self.nowhere.copy()
        lost[decoder.keys] = plan.lost
        fitting = Decision(decoder.recompute, decision.fleeting & decoder.recompute, decision.dearer, decision.away)
        return Attempt(fitting, decoder, plan, lost, self.program, self.budget_bytes)


class _Changes:
    """Decisions near another one: one of several kinds of change, drawn at random."""

    def __init__(self, search: Search, random: np.random.Generator) -> None:
        self.search = search
        self.random = random
        self.droppable = search.droppable
        self.link_seconds = np.array(
            [search.device.offload_seconds(t.nbytes) for t in search.graph.tensors] + [0.0] * len(search.graph.ops)
        )
        kinds: list[tuple[float, Callable[[Attempt], Decision]]] = [
            (0.15, self._toggled),
            (0.45, self._near_a_stall),
            (0.15, self._block),
            (0.15, self._block_of_fleeting),
            (0.1, self._steered),
        ]
        self.kinds = kinds if self.droppable else kinds[-1:]
        self.bounds = np.cumsum([share for share, _ in self.kinds])

    def of(self, attempt: Attempt) -> Decision:
        """A change of the decision of `attempt`."""
        drawn = self.random.random() * self.bounds[-1]
        return self.kinds[int(np.searchsorted(self.bounds, drawn, side="right"))][1](attempt)

    def _toggled(self, attempt: Attempt) -> Decision:
        """One or two tensors recomputed or no longer."""
        some = self.random.integers(len(self.droppable), size=1 + int(self.random.integers(2)))
        return self._with(attempt, attempt.decision.recompute ^ {self.droppable[i] for i in some.tolist()})

    def _near_a_stall(self, attempt: Attempt) -> Decision:
        """A tensor recomputed or no longer that is used near one that compute waits for, by how long it waits."""
        lost = attempt.lost[: len(self.near)]
        total = lost.sum()
        if not total > 0.0:
            return self._toggled(attempt)
        stalled = min(int(np.searchsorted(np.cumsum(lost), self.random.random() * total, side="right")), len(lost) - 1)
        place = self.near[stalled] + int(self.random.integers(-FEW // 2, FEW // 2 + 1))
        tensor = self.droppable[min(max(place, 0), len(self.droppable) - 1)]
        return self._with(attempt, attempt.decision.recompute ^ {tensor})

    def _block(self, attempt: Attempt) -> Decision:
        """Some tensors that are made one after another, all recomputed or none."""
        some = self._neighbours()
        recompute = attempt.decision.recompute
        return self._with(attempt, recompute | some if self.random.random() < 0.5 else recompute - some)

    def _block_of_fleeting(self, attempt: Attempt) -> Decision:
        """Some that are recomputed and made one after another, all for every use or none."""
        chosen = attempt.decision
        some = self._neighbours() & chosen.recompute
        fleeting = chosen.fleeting | some if self.random.random() < 0.5 else chosen.fleeting - some
        return Decision(chosen.recompute, fleeting, chosen.dearer, chosen.away)

    def _steered(self, attempt: Attempt) -> Decision:
        """Other costs of some trips: those that are waited for dearer, or any; or without the hint."""
        chosen, kind = attempt.decision, self.random.random()
        if kind < 0.3:
            dearer = chosen.dearer + self.random.random() * attempt.lost
            return Decision(chosen.recompute, chosen.fleeting, dearer, chosen.away)
        if kind < 0.4 and chosen.away.size:
            return Decision(chosen.recompute, chosen.fleeting, chosen.dearer, chosen.away[:0])
        dearer = chosen.dearer.copy()
        count = max(1, int(len(dearer) / 10 ** (1 + 2 * self.random.random())))
        some = self.random.integers(len(dearer), size=count)
        dearer[some] = self.link_seconds[some] * self.random.random(count) * (self.random.random(count) < 0.7)
        return Decision(chosen.recompute, chosen.fleeting, dearer, chosen.away)

    def _with(self, attempt: Attempt, recompute: frozenset[int]) -> Decision:
        chosen = attempt.decision
        return Decision(recompute, chosen.fleeting & recompute, chosen.dearer, chosen.away)

    def _neighbours(self) -> frozenset[int]:
        """Up to FEW tensors that are made one after another."""
        first, count = int(self.random.integers(len(self.droppable))), int(self.random.integers(2, FEW + 1))
        return frozenset(self.droppable[first : first + count])

    @cached_property
    def near(self) -> list[int]:
        """For each tensor the place in `droppable` of one that is used by the op in the middle of its uses, or next."""
        graph = self.search.graph
        used = {op: place for place, tensor in enumerate(self.droppable) for op in graph.uses[tensor]}
        ops = sorted(used)

        def place(uses: Collection[int]) -> int:
            middle = sorted(uses)[len(uses) // 2] if uses else 0
            return used[ops[min(bisect_left(ops, middle), len(ops) - 1)]]

        return [place(uses) for uses in graph.uses]
