"""The search of `auto`: from rounded relaxations to the best plan that a fixed effort finds, deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from overspill.bounds.hint import Hinting
from overspill.core import Device, Schedule
from overspill.planning.algorithms import memory_optimal
from overspill.planning.floor import algorithms_within
from overspill.planning.gaps import possible_trips, saved_gaps
from overspill.planning.step_program import Program
from overspill.policies.checkpoint import dropped_sets

from . import _search
from .native import GapKeys, flags, gap_keys, native_graph, planner_of, schedule_of
from .remat_groups import Units, by_op

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
EFFORT = 3_200_000
"""How often candidates are looked at in all attempts, so that planning takes up to two seconds on one core."""
HINT = 0.43
"""The share of this that the relaxation takes, and that a whole step, which is planned three times, goes without."""
ATTEMPTS_EACH = 64
"""How many attempts there are at most for each tensor that may be recomputed."""
STEERING = 0.05
"""To one other change of a plan, how many steer what moves and what takes slower algorithms."""
MORE_EFFORT = 5_000_000
MOST_OPS = 500
"""Where that leaves effort, or a step has no more ops than these, a second search goes on from the best plan …"""
MORE_ATTEMPTS_EACH = 500
MORE_STEERING = 0.3
"""… with as many attempts, more of which steer."""
ATTEMPTS_IF_BRIEF = 8
SMALL = 0.001
"""Outputs of an op below this share of the budget are not worth a change of their own."""
TEMPERATURE = 0.001
"""The share of the ops' own time that a change may cost at first, on average; it falls to none (simulated annealing)."""


@dataclass(frozen=True)
class Attempt:
    """A plan of `program`, with other things recomputed, that fits into a budget."""

    made: _search.Attempt
    program: Program
    budget_bytes: int

    @property
    def cost(self) -> tuple[float, int]:
        """What is to be made small: seconds, then bytes moved."""
        return self.made.plan.seconds, self.made.plan.moved_bytes

    def cost_on(self, device: Device) -> tuple[float, int]:
        """The same on a device with another link."""
        return self.made.seconds_on(device), self.made.plan.moved_bytes

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step."""
        return self.made.plan.seconds

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at a time."""
        return self.made.plan.peak_bytes

    def schedule(self, policy: str) -> Schedule:
        """The schedule of this plan."""
        recompute, fleeting = self.made.recompute.tolist(), self.made.fleeting.tolist()
        program = Program(self.program.graph, recompute, self.program.algorithms, fleeting)
        return schedule_of(self.made.decoder, self.made.plan, program, policy, self.budget_bytes)


class Ground:
    """What the searches for a fast step of `program` share, whatever the budget and the link.

    `seconds[i]` is what op `i` takes with its fastest algorithm.
    """

    def __init__(self, program: Program, seconds: Sequence[float]) -> None:
        self.program, self.graph, self.seconds = program, program.graph, seconds
        self.native = native_graph(program.graph, seconds)
        self._units = cache(partial(Units, program.graph))

    @cached_property
    def droppable(self) -> list[int]:
        """Saved tensors that may be recomputed, in the order of their making."""
        graph = self.graph
        found = (t for t in saved_gaps(self.program) if t in graph.ops[graph.producer[t]].recompute_writes)
        return sorted(found, key=lambda t: (graph.producer[t], t))

    @cached_property
    def checkpoints(self) -> list[tuple[int, ...]]:
        """What checkpoints drop, with segments of several sizes."""
        return list(dropped_sets(self.graph, self.seconds))

    def units(self, budget_bytes: int) -> Units:
        """What is recomputed together: the saved outputs of an op, but not those that are too small to matter."""
        all_units, least = by_op(self.graph, self.droppable), SMALL * budget_bytes
        large = [u for u in all_units if sum(self.graph.tensors[t].nbytes for t in u) >= least]
        return self._units(tuple(large or all_units))


class Search:
    """The search for the fastest step within a budget, which at least one plan keeps, over the link of a device."""

    def __init__(
        self, ground: Ground, device: Device, budget_bytes: int, *, brief: bool = False, patience: int = 0
    ) -> None:
        """`brief`: it is one of many, and makes do without the relaxation's hint and with few attempts.

        `patience`: how many times as long as the second search a third may take.
        """
        self.ground, self.device, self.budget_bytes = ground, device, budget_bytes
        self.brief, self.patience = brief, patience
        self.graph, self.seconds = ground.graph, ground.seconds
        self.program = ground.program.with_algorithms(algorithms_within(ground.program, budget_bytes))
        planner = planner_of(ground.native, self.program, device, budget_bytes)
        self.walk = _search.Walk(planner, ground.units(budget_bytes).native)

    def best(self) -> Attempt:
        """The best attempt; there is always one, for without recomputation the least fits."""
        aim = GOOD_ENOUGH * sum(self.seconds)
        for recompute, away in self._starts():
            self.walk.begin(flags(recompute, self.graph), away)
            if (best := self.walk.best) is not None and best.plan.seconds <= aim:
                break
        self._go_on(aim)
        best = self.walk.best
        assert best is not None
        return Attempt(best, self.program, self.budget_bytes)

    # -- where to start

    def _starts(self) -> Iterator[tuple[Sequence[int], GapKeys]]:
        """What to recompute and what to move first: nothing, the relaxation's roundings, what checkpoints drop."""
        unhinted = gap_keys(self.program, ())
        yield (), unhinted
        hinted = not self.brief and self._has_room
        if hinted or self.graph.whole_step:
            self.walk.looks += int(HINT * EFFORT)
        relaxation = Hinting(self.program, self.device, self.budget_bytes, self.seconds) if hinted else None
        for share in SHARES:
            if relaxation is None or (relaxed := relaxation.solve(share)) is None:
                continue
            away = gap_keys(self.program, (gap for gap, part in relaxed.away.items() if part > MOSTLY))
            for threshold in THRESHOLDS:
                yield self._rounded(relaxed.recompute, threshold), away
        for dropped in self.ground.checkpoints:
            yield dropped, unhinted

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

    def _rounded(self, recompute: Mapping[int, float], threshold: float) -> list[int]:
        """The saved tensors whose ops the relaxation runs again by more than `threshold`."""
        producer = self.graph.producer
        return [t for t in self.ground.droppable if recompute.get(producer[t], 0.0) > threshold]

    # -- the local search

    def _go_on(self, aim: float) -> None:
        """Changes drawn at random; where planning is quick, again from the best plan, with more steering."""
        self._anneal(ATTEMPTS_IF_BRIEF if self.brief else ATTEMPTS_EACH, EFFORT, STEERING, aim)
        if self.brief:
            return
        # A whole step is planned three times (`order.py`), which is long enough.
        if not self.graph.whole_step and (self.walk.looks < EFFORT or len(self.graph.ops) <= MOST_OPS):
            self._anneal(MORE_ATTEMPTS_EACH, MORE_EFFORT, MORE_STEERING, aim)
        if self.patience:
            self._anneal(self.patience * MORE_ATTEMPTS_EACH, self.patience * MORE_EFFORT, MORE_STEERING, aim)

    def _anneal(self, attempts_each: int, effort: int, steering: float, aim: float) -> None:
        most = attempts_each * (1 + len(self.ground.droppable))
        self.walk.go_on(most, effort, steering, TEMPERATURE * sum(self.seconds), aim)
