"""Updates that are carried out together: postponed past what does not concern them, where memory allows.

An optimizer's step costs the host as much for one small parameter as for a hundred. A plan that frees each gradient as soon
as it can has one update here and one there; this pass gathers them, without a higher peak.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from overspill.core import Graph, Instruction, Schedule, Verb

MOST_TOGETHER = 64
"""So many updates share what one step of an optimizer costs; of more, the share that is left matters no longer."""


def gather(
    graph: Graph, schedule: Schedule, updates: Collection[int], live_bytes: Sequence[int]
) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """`schedule` with the ops `updates` postponed, and the groups of those that can then run as one.

    `live_bytes[i]` is the most on the device during instruction `i`. With what a group takes for all its updates at once,
    it stays within the largest of them.
    """
    gathering = _Gathering(graph, schedule, frozenset(updates), max(live_bytes, default=0))
    for index, live in enumerate(live_bytes):
        gathering.step(index, live)
    gathering.flush()
    return replace(schedule, instructions=tuple(gathering.made)), tuple(gathering.groups)


class _Gathering:
    """The schedule so far, and the updates that wait, with what they keep on the device."""

    def __init__(self, graph: Graph, schedule: Schedule, updates: frozenset[int], limit_bytes: int) -> None:
        self.ops = graph.ops
        self.nbytes = [tensor.nbytes for tensor in graph.tensors]
        self.instructions = schedule.instructions
        self.updates = updates
        self.limit = limit_bytes
        self.present = {t.id for t in graph.tensors if t.persistent} - set(schedule.stored)
        self.bytes = sum(
            self.nbytes[t] for t in self.present
        )  # as planned, which is less than there is while frees wait
        self.made: list[Instruction] = []
        self.groups: list[tuple[int, ...]] = []
        self.waiting: list[Instruction] = []
        self.frees: list[Instruction] = []
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.held = self.workspace = 0

    def step(self, index: int, live: int) -> None:
        """Carry out one instruction of the plan, or let it wait; `live` is the most on the device during it."""
        instruction = self.instructions[index]
        verb, target = instruction.verb, instruction.target
        if verb is Verb.FREE and target in self.reads and target not in self.writes:
            self.frees.append(instruction)
            self.held += self._take_away(target)
        elif verb is Verb.RUN and target in self.updates:
            op = self.ops[target]
            taken = self.bytes + self.held + self.workspace + op.workspace_bytes
            if taken > self.limit or len(self.waiting) == MOST_TOGETHER or self._concerns(op.reads, op.writes):
                self.flush()
            self.waiting.append(instruction)
            self.workspace += op.workspace_bytes
            self.reads.update(op.reads)
            self.writes.update(op.writes)
        else:
            self._pass(index, live)

    def _pass(self, index: int, live: int) -> None:
        """Carry out what is no update, and before it those that wait, if they cannot wait any longer."""
        instruction = self.instructions[index]
        verb, target = instruction.verb, instruction.target
        reads: tuple[int, ...]
        writes: tuple[int, ...]
        if verb is Verb.RUN or verb is Verb.RECOMPUTE:
            op = self.ops[target]
            again = verb is Verb.RECOMPUTE
            reads, writes = (op.recompute_reads, op.recompute_writes) if again else (op.reads, op.writes)
            comes = writes
        else:  # a transfer has to find, and to leave, a tensor as it was planned
            reads, writes = (), (target,)
            comes = (target,) if verb is Verb.PREFETCH else ()
        coming = sum(self.nbytes[t] for t in set(comes) - self.present)
        behind = self.bytes + coming + self.held + self.workspace - self._freed_behind(index, comes)
        is_full = verb is not Verb.FREE and max(live + self.held, behind) > self.limit
        if self.waiting and (is_full or self._concerns(reads, writes)):
            self.flush()
        self.made.append(instruction)
        self.present.update(comes)
        self.bytes += coming
        if verb is Verb.FREE:
            self._take_away(target)

    def _freed_behind(self, index: int, comes: Collection[int]) -> int:
        """Bytes that go with the frees right behind an instruction, ahead of any other chance to carry out what waits."""
        freed = 0
        for behind in range(index + 1, len(self.instructions)):
            verb, tensor = self.instructions[behind].verb, self.instructions[behind].target
            if verb is not Verb.FREE or tensor in self.writes:
                break
            if tensor not in self.reads and (tensor in self.present or tensor in comes):
                freed += self.nbytes[tensor]
        return freed

    def _concerns(self, reads: Collection[int], writes: Collection[int]) -> bool:
        """Whether what reads and writes these cannot change places with those that wait."""
        return not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))

    def _take_away(self, tensor: int) -> int:
        """Count `tensor` as gone; its bytes, if it was there."""
        if tensor not in self.present:
            return 0
        self.present.remove(tensor)
        self.bytes -= self.nbytes[tensor]
        return self.nbytes[tensor]

    def flush(self) -> None:
        """Carry out those that wait."""
        self.made += self.waiting
        self.made += self.frees
        if len(self.waiting) > 1:
            self.groups.append(tuple(instruction.target for instruction in self.waiting))
        self.waiting, self.frees = [], []
        self.reads, self.writes = set(), set()
        self.held = self.workspace = 0
