"""Split a schedule at the cuts of its step, where the user's code runs: forward | backward | update.

A transfer that is under way at a cut is awaited there, but for copies to the store of what only backward needs. A step
without a backward has one part, and so has a whole step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from overspill.core import Graph, Instruction, Phase, Schedule, Verb


class Place(Enum):
    """Where a tensor is at a cut."""

    DEVICE = "device"
    STORE = "store"
    BOTH = "both"


@dataclass(frozen=True)
class Part:
    """The instructions of one stretch, with the places of tensors around it."""

    instructions: tuple[tuple[int, Instruction], ...]
    """Each with its position in the schedule, or -1."""
    before: dict[int, Place]
    """Of tensors that exist."""
    after: dict[int, Place]


def parts_of(graph: Graph, schedule: Schedule, *, trains: bool) -> list[Part]:
    """Return the parts of forward, backward and update; one for all if the step has no cuts."""
    numbered, walk = list(enumerate(schedule.instructions)), _Walk(graph, schedule)
    if graph.whole_step or not trains:
        return [walk.part(numbered, None)]
    phases = {i: graph.ops[x.target].phase for i, x in numbered if x.verb is Verb.RUN}
    first = _end(schedule, [i for i, phase in phases.items() if phase is Phase.FORWARD])
    second = _end(schedule, [i for i, phase in phases.items() if phase is not Phase.UPDATE])
    saved = frozenset(t.id for t in graph.tensors if not t.persistent)
    return [
        walk.part(numbered[:first], saved), walk.part(numbered[first:second], ()), walk.part(numbered[second:], None)
    ]  # fmt: skip


def copied(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the tensors that are both on the device and in the store between steps.

    No op writes them on the device, and `schedule` reads them from the store, or updates them there.
    """
    on_host = schedule.targets(Verb.RUN_ON_HOST)
    updated = [t for op in on_host for t in graph.ops[op].writes]
    read = dict.fromkeys((*schedule.targets(Verb.PREFETCH), *updated)).keys() - schedule.stored
    found = read & graph.read_only
    found |= {t for t in read.intersection(updated) if graph.tensors[t].persistent and len(graph.written_by[t]) == 1}
    return sorted(found)


def _end(schedule: Schedule, runs: Sequence[int]) -> int:
    """Return the position behind these of a stretch's ops, and behind what then leaves the device."""
    end = max(runs, default=-1) + 1
    instructions = schedule.instructions
    while end < len(instructions) and instructions[end].verb in (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.FREE):
        end += 1
    return end


class _Walk:
    """Follows the places of tensors through a schedule."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self._graph = graph
        persistent = {tensor.id for tensor in graph.tensors if tensor.persistent}
        self._state = dict.fromkeys(sorted(persistent.difference(schedule.stored)), Verb.RUN)
        """Of tensors on the device: PREFETCH if arriving, OFFLOAD if leaving, otherwise RUN."""
        self._stored = {*schedule.stored, *copied(graph, schedule)}
        self._awaited: set[Instruction] = set()

    def part(self, instructions: Iterable[tuple[int, Instruction]], crossing: Container[int] | None) -> Part:
        """Return the part of these instructions.

        Behind them all transfers are awaited, but for copies of tensors in `crossing` to the store; if that is None,
        none is.
        """
        before, kept = self._places(), []
        for position, instruction in instructions:
            if instruction in self._awaited:
                self._awaited.discard(instruction)
                continue
            kept.append((position, instruction))
            self._follow(instruction)
        for tensor, state in list(self._state.items()):
            if crossing is None:
                break
            if state is Verb.PREFETCH or (state is Verb.OFFLOAD and tensor not in crossing):
                end = Instruction(Verb.AWAIT_OFFLOAD if state is Verb.OFFLOAD else Verb.AWAIT_PREFETCH, tensor)
                self._awaited.add(end)
                kept.append((-1, end))
                self._follow(end)
        return Part(tuple(kept), before, self._places())

    def _places(self) -> dict[int, Place]:
        there = {t: Place.BOTH if t in self._stored else Place.DEVICE for t in self._state}
        return there | {t: Place.STORE for t in self._stored if t not in self._state}

    def _follow(self, instruction: Instruction) -> None:
        verb, target = instruction.verb, instruction.target
        if verb in (Verb.RUN, Verb.RECOMPUTE):
            op = self._graph.ops[target]
            for tensor in op.writes if verb is Verb.RUN else op.recompute_writes:
                if verb is Verb.RUN or tensor not in self._state:
                    self._stored.discard(tensor)
                self._state[tensor] = Verb.RUN
        elif verb in (Verb.OFFLOAD, Verb.PREFETCH):
            self._state[target] = verb
        elif verb is Verb.FREE:
            del self._state[target]
        elif verb not in (Verb.START, Verb.RUN_ON_HOST):  # which leaves what it writes in the store
            self._state[target] = Verb.RUN
            if verb is Verb.AWAIT_OFFLOAD:
                self._stored.add(target)
