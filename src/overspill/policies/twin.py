"""What native/planning does to make one plan, in plain Python: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from overspill.core import Device, Schedule, Verb
from overspill.simulate import simulate

from .algorithms import memory_optimal
from .assemble import assemble
from .base import possible_trips
from .decoding import Flags, Seconds
from .program import Program
from .select import Choices
from .timing import timed
from .trips import candidates


@dataclass(frozen=True)
class TwinPlan:
    """The candidates chosen, the schedule that comes of it, its seconds, and those lost: by tensor, then by op."""

    chosen: list[int]
    schedule: Schedule
    seconds: float
    moved_bytes: int
    lost: Seconds

    @property
    def cost(self) -> tuple[float, int]:
        """What is to be made small: seconds, then bytes moved."""
        return self.seconds, self.moved_bytes


def fitting(
    program: Program, recompute: Collection[int], fleeting: Collection[int], budget_bytes: int
) -> tuple[Program, frozenset[int]] | None:
    """The program that recomputes these, less those for which there is no room where they are made again, and what is left."""
    graph, remade = program.graph, frozenset(recompute)
    while True:
        found = Program(graph, remade, program.algorithms, fleeting)
        least = found.with_algorithms(memory_optimal(graph))
        over = least.live_bytes(possible_trips(least)) > budget_bytes
        if not over.any():
            return found, remade
        if not remade:
            return None
        around = {p + d for p in np.flatnonzero(over).tolist() for d in (-1, 0, 1)}
        crowded = {gap.tensor for gap in found.gaps if gap.remade and gap.end in around} & remade
        remade -= crowded or remade


def decode(
    program: Program, device: Device, seconds: Sequence[float], budget_bytes: int, dearer: Seconds, first: Flags
) -> TwinPlan:
    """The plan that takes candidates `first` before all others.

    `dearer` are seconds that trips cost more, by tensor, and then slower algorithms, by op.
    """
    graph, among = program.graph, candidates(program, device, seconds)
    choices = Choices(among, program.durations(seconds), program.end_of_forward)
    whats = [c.gap.tensor if c.gap else len(graph.tensors) + program.steps[c.position].op for c in among]
    chosen = choices.select(program.live_bytes(), budget_bytes, np.flatnonzero(first), dearer[whats])
    algorithms = dict(program.algorithms)
    for candidate in (among[i] for i in chosen):
        if candidate.gap is None:
            op = program.steps[candidate.position].op
            algorithms[op] = max(algorithms.get(op, 0), candidate.algorithm)
    gaps = list(dict.fromkeys(gap for i in chosen if (gap := among[i].gap) is not None))
    slower = program.with_algorithms(algorithms)
    transfers = timed(slower, gaps, slower.live_bytes(gaps), seconds, device, budget_bytes)
    schedule = assemble(slower, transfers, "twin", budget_bytes)
    timeline = simulate(graph, schedule, device, seconds)
    lost = np.zeros(len(graph.tensors) + len(graph.ops))
    for stall in timeline.stalls:
        lost[schedule.instructions[stall.instruction].target] += stall.end_seconds - stall.start_seconds
    for step, now, before in zip(program.steps, slower.durations(seconds), program.durations(seconds), strict=True):
        lost[len(graph.tensors) + step.op] += now - before
    offloads = (i.target for i in schedule.instructions if i.verb is Verb.OFFLOAD)
    return TwinPlan(chosen, schedule, timeline.step_seconds, sum(graph.tensors[t].nbytes for t in offloads), lost)
