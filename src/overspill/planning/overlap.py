"""Start collectives before they are waited for: gathers ahead of their readers, scatters waited for later.

A gather starts as late as it costs no time, later if memory is short. A scatter is waited for once it should be done,
sooner if its result is read or memory is short. The tensors that it reads are freed then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from overspill.core import CollectiveKind, Device, Graph, Instruction, Op, Phase, Schedule, Verb
from overspill.simulate import simulate

EARLY = 1.2
"""A gather starts so many times its own duration ahead of its reader, because others may be late."""


def overlapped(
    graph: Graph, schedule: Schedule, device: Device, seconds: Sequence[float], budget_bytes: int | None
) -> Schedule:
    """Return `schedule` with its gathers and scatters started apart from their ends, within the budget.

    It is unchanged if it has none, or if some are started already. Op `i` takes `seconds[i]`. Without a budget, a
    gather for backward starts once the gather before it is done, as FSDP2 fetches ahead.
    """
    apart = {op.id for op in graph.ops if runs_apart(op)}
    if not apart or any(i.verb is Verb.START for i in schedule.instructions):
        return schedule
    return _Overlap(graph, schedule, device, seconds, apart, budget_bytes).schedule()


def runs_apart(op: Op) -> bool:
    """Return whether an op runs next to compute: a gather or a scatter, not a reduction in place."""
    return op.collective is not None and op.collective.kind is not CollectiveKind.REDUCE


def computing_seconds(graph: Graph, seconds: Sequence[float]) -> list[float]:
    """Return the seconds of compute that each op takes: none for those that run next to it."""
    return [0.0 if runs_apart(op) else took for op, took in zip(graph.ops, seconds, strict=True)]


def cheaply_gathered(graph: Graph, device: Device, seconds: Sequence[float]) -> frozenset[int]:
    """Return the tensors that are gathered again in less time than fetching them from the store takes."""
    gathers = (op for op in graph.ops if runs_apart(op) and op.recomputable)
    fetched = [
        (op, sum(device.prefetch_seconds(graph.tensors[t].nbytes) for t in op.recompute_writes)) for op in gathers
    ]
    return frozenset(t for op, took in fetched if seconds[op.id] <= took for t in op.recompute_writes)


@dataclass
class _Flight:
    """A collective: its instruction, and the range of indices before which it may start and must have ended."""

    op: Op
    at: int
    start: int
    end: int
    frees: list[int] = field(default_factory=list)
    """Instructions that free what it reads, which wait for its end."""


class _Overlap:
    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        device: Device,
        seconds: Sequence[float],
        apart: set[int],
        budget_bytes: int | None,
    ) -> None:
        self.graph, self.before, self.seconds = graph, schedule, seconds
        self.nbytes = [tensor.nbytes for tensor in graph.tensors]
        # When compute reaches each instruction if it waits for no collective, and the bytes there.
        timeline = simulate(graph, schedule, device, computing_seconds(graph, seconds))
        self.clock = np.concatenate([[0.0], timeline.clock_seconds])
        self.live: NDArray[np.int64] = np.array(timeline.live_bytes, dtype=np.int64)
        self.ahead = budget_bytes is None
        self.limit = max(timeline.peak_bytes, budget_bytes) if budget_bytes is not None else 1 << 62
        self.flights = self._flights(apart)

    def schedule(self) -> Schedule:
        """Return the schedule with its collectives started apart."""
        wanted = self._wanted_starts()
        free = 0.0
        for flight in self.flights:
            if _gathers(flight.op):
                self._place_start(flight, wanted[flight.at])
                free = max(free, self.clock[flight.start]) + self.seconds[flight.op.id]
            else:
                free = max(free, self.clock[flight.at]) + self.seconds[flight.op.id]
                self._place_end(flight, free)
        return replace(self.before, instructions=self._instructions())

    def _flights(self, apart: set[int]) -> list[_Flight]:
        """Return all collectives, with the widest ranges that their tensors allow."""
        found: list[_Flight] = []
        changed = dict.fromkeys(range(len(self.nbytes)), 0)  # the index after the last change of a tensor's copy
        ran: dict[int, int] = {}
        cut = self._cut()
        open_: dict[int, _Flight] = {}  # scatters, by result and by what they read
        for index, instruction in enumerate(self.before.instructions):
            verb, target = instruction.verb, instruction.target
            reads, writes = self._touched(verb, target)
            if verb is Verb.FREE and (flight := open_.get(target)) is not None and target in flight.op.reads:
                flight.frees.append(index)
                continue
            for tensor in (*reads, *writes):
                if (flight := open_.pop(tensor, None)) is not None:
                    flight.end = min(flight.end, index)
            if verb in (Verb.RUN, Verb.RECOMPUTE) and target in apart:
                op = self.graph.ops[target]
                if _gathers(op):
                    first = max(
                        [ran.get(target, 0), cut if index > cut else 0, *(changed[t] for t in (*reads, *writes))]
                    )
                    found.append(_Flight(op, index, first, index))
                else:
                    found.append(_Flight(op, index, index, len(self.before.instructions)))
                    open_.update(dict.fromkeys((*reads, *writes), found[-1]))
                ran[target] = index + 1
            if verb is not Verb.OFFLOAD and verb is not Verb.AWAIT_OFFLOAD:
                changed.update(dict.fromkeys(writes, index + 1))
        return found

    def _touched(self, verb: Verb, target: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if verb in (Verb.RUN, Verb.RUN_ON_HOST):
            return self.graph.ops[target].reads, self.graph.ops[target].writes
        if verb is Verb.RECOMPUTE:
            return self.graph.ops[target].recompute_reads, self.graph.ops[target].recompute_writes
        return (), (target,)

    def _wanted_starts(self) -> dict[int, int]:
        """Return by instruction of a gather the one before which it starts in time."""
        wanted: dict[int, int] = {}
        following = float("inf")
        for flight in reversed(self.flights):
            if _gathers(flight.op):
                following = min(self.clock[flight.at], following) - EARLY * self.seconds[flight.op.id]
                wanted[flight.at] = int(np.searchsorted(self.clock[: flight.at + 1], following, side="right")) - 1
        if self.ahead:
            before = self._first_of_backward()
            for flight in self.flights:
                if _gathers(flight.op) and self.before.instructions[flight.at].verb is Verb.RECOMPUTE:
                    wanted[flight.at], before = min(wanted[flight.at], before), flight.at + 1
        return wanted

    def _cut(self) -> int:
        """Return the index behind forward, over which no collective runs where forward and backward are two graphs."""
        ops, runs = self.graph.ops, enumerate(self.before.instructions)
        if self.graph.whole_step:
            return 0
        return 1 + max(
            (i for i, it in runs if it.verb is Verb.RUN and ops[it.target].phase is Phase.FORWARD), default=-1
        )

    def _first_of_backward(self) -> int:
        instructions = self.before.instructions
        runs = ((i, self.graph.ops[it.target]) for i, it in enumerate(instructions) if it.verb is Verb.RUN)
        return next((i for i, op in runs if op.phase is Phase.BACKWARD), len(instructions))

    def _place_start(self, flight: _Flight, wanted: int) -> None:
        """Start a gather where it is wanted, or later if memory is short."""
        again = self.before.instructions[flight.at].verb is Verb.RECOMPUTE
        writes = flight.op.recompute_writes if again else flight.op.writes
        taken = sum(self.nbytes[t] for t in writes) + flight.op.workspace_bytes
        first = min(max(flight.start, wanted), flight.at)
        full = np.flatnonzero(self.live[first : flight.at] + taken > self.limit)
        flight.start = first + int(full[-1]) + 1 if full.size else first
        self.live[flight.start : flight.at] += taken

    def _place_end(self, flight: _Flight, done: float) -> None:
        """Wait for a scatter when it is done, or sooner if its result is read or memory is short."""
        last = min(flight.end, max(flight.at + 1, int(np.searchsorted(self.clock, done, side="left"))))
        held = np.full(max(0, last - flight.at - 1), flight.op.workspace_bytes, dtype=np.int64)
        for index in flight.frees:
            held[max(0, index - flight.at - 1) :] += self.nbytes[self.before.instructions[index].target]
        full = np.flatnonzero(self.live[flight.at + 1 : last] + held > self.limit)
        flight.end = flight.at + 1 + int(full[0]) if full.size else last
        self.live[flight.at + 1 : flight.end] += held[: flight.end - flight.at - 1]

    def _instructions(self) -> tuple[Instruction, ...]:
        starts: dict[int, list[Instruction]] = defaultdict(list)
        ends: dict[int, list[Instruction]] = defaultdict(list)
        moved: set[int] = set()
        for flight in self.flights:
            run = self.before.instructions[flight.at]
            if flight.start < flight.at or flight.end > flight.at + 1:
                starts[flight.start].append(replace(run, verb=Verb.START))
            if not _gathers(flight.op) and flight.end > flight.at + 1:
                late = [index for index in flight.frees if index < flight.end]
                moved.update((flight.at, *late))
                ends[flight.end] += [run, *(self.before.instructions[index] for index in late)]
        made: list[Instruction] = []
        for index, instruction in enumerate(self.before.instructions):
            made += ends.get(index, ())
            made += starts.get(index, ())
            if index not in moved:
                made.append(instruction)
        return (*made, *ends.get(len(self.before.instructions), ()))


def _gathers(op: Op) -> bool:
    return op.collective is not None and op.collective.kind is CollectiveKind.GATHER
