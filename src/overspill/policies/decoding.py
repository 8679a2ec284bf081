"""From priorities to a timed plan: the trips that a program makes, when each moves, and what that costs on the clock.

The greedy choice of `select.py` among the candidates of `trips.py`, timed by `timing.py` and put on the clock of
`simulate`. A search asks for thousands of these, so they are native (native/planning/decoder.hpp).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Phase, Schedule

from . import _planning
from .algorithms import memory_optimal
from .assemble import Transfer, assemble
from .base import may_move
from .program import Gap, Program

Flags = NDArray[np.bool_]
Seconds = NDArray[np.float64]
GapKeys = NDArray[np.int64]


@dataclass(frozen=True)
class Decoded:
    """A plan: the step takes `seconds` and moves `moved_bytes` to the store.

    `chosen` are the candidates taken, `trips` those made, each released and issued before the steps that `release` and
    `issue` name. `lost` are seconds, by candidate: those that compute waited for its tensor, or that its op took longer. `looks` is how
    often a candidate was looked at.
    """

    looks: int
    seconds: float
    moved_bytes: int
    chosen: NDArray[np.int32]
    trips: NDArray[np.int32]
    release: NDArray[np.int32]
    issue: NDArray[np.int32]
    lost: Seconds

    @property
    def cost(self) -> tuple[float, int]:
        """What is to be made small: seconds, then bytes moved."""
        return self.seconds, self.moved_bytes


class Decoder:
    """A program under a budget, to be planned many times with other priorities of the candidates."""

    def __init__(self, native: _planning.Decoder, recompute: frozenset[int], tensors: int) -> None:
        """`tensors`: how many the graph has."""
        self.recompute = recompute
        self._tensors = tensors
        self.trip_of: NDArray[np.int32] = native.trip_of()
        self._native = native

    def __len__(self) -> int:
        """How many candidates there are."""
        return len(self._native)

    def decode(self, dearer: Seconds, first: Flags) -> Decoded:
        """The plan that takes candidates `first` before all others, where each costs `dearer` more seconds."""
        return Decoded(*self._native.decode(dearer, first))

    @cached_property
    def trips(self) -> NDArray[np.int32]:
        """For each trip that may be made its tensor, the steps at the ends of its gap, and that before which it starts."""
        found: NDArray[np.int32] = self._native.trips().reshape(-1, 4)
        return found

    @cached_property
    def keys(self) -> NDArray[np.int32]:
        """For each candidate what it is of: a tensor's number, or the number of tensors and an op's."""
        ops = self._native.slower().reshape(-1, 2)[:, 0] + self._tensors
        found: NDArray[np.int32] = np.concatenate([self.trips[self.trip_of[: len(self) - len(ops)], 0], ops])
        return found

    def among(self, gaps: GapKeys) -> Flags:
        """The candidates that are parts of trips in these gaps."""
        if not gaps.size:
            return np.zeros(len(self), dtype=bool)
        ops = np.append(self._native.ops(), np.int32(-1)).astype(np.int64)
        tensor, start, end, _ = self.trips.astype(np.int64).T
        keys = _key(tensor, ops[start], ops[end])
        there = gaps[np.minimum(np.searchsorted(gaps, keys), gaps.size - 1)] == keys
        return np.append(there, np.False_)[self.trip_of]

    def as_chosen(self, other: Decoder, plan: Decoded) -> Flags:
        """The candidates that are the same parts of the same trips as those that a plan of another decoder takes."""
        return self._native.as_chosen(other._native, plan.chosen).view(np.bool_)

    def schedule(self, plan: Decoded, program: Program, policy: str, budget_bytes: int) -> Schedule:
        """The schedule of a plan that this has made for `program`."""
        algorithms = dict(program.algorithms)
        slower = self._native.slower().reshape(-1, 2).tolist()
        first = len(self) - len(slower)
        for candidate in plan.chosen.tolist():
            if candidate >= first:
                op, number = slower[candidate - first]
                algorithms[op] = max(algorithms.get(op, 0), number)
        made = zip(self.trips[plan.trips].tolist(), plan.release.tolist(), plan.issue.tolist(), strict=True)
        transfers = [
            Transfer(Gap(tensor, start, end), copy, release, issue, end)
            for (tensor, start, end, copy), release, issue in made
        ]
        return assemble(program.with_algorithms(algorithms), transfers, policy, budget_bytes)


class Decoders:
    """Decoders for programs of one graph, which recompute one thing or another, on a device under a budget."""

    def __init__(self, program: Program, device: Device, seconds: Sequence[float], budget_bytes: int) -> None:
        graph = program.graph
        least = memory_optimal(graph)
        self._graph = graph
        self._native = _planning.Planner(
            graph,
            np.array(seconds),
            np.array([op.phase is Phase.FORWARD for op in graph.ops]),
            np.array([may_move(tensor) for tensor in graph.tensors]),
            np.array([program.algorithms.get(op.id, 0) for op in graph.ops], dtype=np.int32),
            np.array([least.get(op.id, 0) for op in graph.ops], dtype=np.int32),
            graph.whole_step,
            device,
            budget_bytes,
        )

    def fitting(self, recompute: Collection[int], fleeting: Collection[int]) -> Decoder | None:
        """A decoder of the program that recomputes these, less those for which there is no room where they are made again.

        None where no program fits that recomputes some of them.
        """
        found = self._native.fitting(self._flags(recompute), self._flags(fleeting))
        return None if found is None else Decoder(found[0], frozenset(found[1].tolist()), len(self._graph.tensors))

    def _flags(self, tensors: Collection[int]) -> Flags:
        flags = np.zeros(len(self._graph.tensors), dtype=bool)
        flags[list(tensors)] = True
        return flags


def gap_keys(program: Program, gaps: Iterable[Gap]) -> GapKeys:
    """Numbers, in order, that stand for these gaps in every program of a graph: for their tensors and the ops at the ends."""
    ops = [*(step.op for step in program.steps), -1]
    return np.array(sorted(_key(gap.tensor, ops[gap.start], ops[gap.end]) for gap in gaps), dtype=np.int64)


def _key(tensor: Any, start: Any, end: Any) -> Any:
    return (tensor << 42) + (start << 21) + end
