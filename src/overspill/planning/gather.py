"""Updates that are carried out together: postponed past what does not concern them, where memory allows.

An optimizer's step costs the host as much for one small parameter as for a hundred. A plan that frees each gradient as soon
as it can has one update here and one there; this pass gathers them, without a higher peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from overspill.core import Graph, Instruction, Schedule, Verb

MOST_TOGETHER = 64
"""So many updates share what one step of an optimizer costs; of more, the share that is left matters no longer."""


def gather(
    graph: Graph, schedule: Schedule, updates: Collection[int], live_bytes: Sequence[int], share: float = 1.0
) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """`schedule` with the ops `updates` postponed, and the groups of those that can then run as one.

    `live_bytes[i]` is the most on the device during instruction `i`. With what a group takes for all its updates at once,
    it stays within a `share` of the largest of them, where the plan itself does.
    """
    gathering = _Gathering(graph, schedule, frozenset(updates), int(share * max(live_bytes, default=0)))
    for index, live in enumerate(live_bytes):
        gathering.step(index, live)
    gathering.carry_out(gathering.waiting)
    return replace(schedule, instructions=tuple(gathering.made)), tuple(gathering.groups)


@dataclass(frozen=True)
class _Update:
    """One that waits: its instruction, and what it touches and takes."""

    instruction: Instruction
    reads: frozenset[int]
    writes: frozenset[int]
    workspace_bytes: int


class _Gathering:
    """The schedule so far, the updates that wait, and the frees that wait for these."""

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
        self.waiting: list[_Update] = []
        self.frees: dict[int, Instruction] = {}
        self.reads: Counter[int] = Counter()  # by how many that wait
        self.writes: Counter[int] = Counter()
        self.held = self.workspace = 0

    def step(self, index: int, live: int) -> None:
        """Carry out one instruction of the plan, or let it wait; `live` is the most on the device during it."""
        instruction = self.instructions[index]
        verb, target = instruction.verb, instruction.target
        if verb is Verb.FREE and target in self.present and self.reads[target] and not self.writes[target]:
            self.frees[target] = instruction
            self.held += self._take_away(target)
        elif verb is Verb.RUN and target in self.updates:
            op = self.ops[target]
            update = _Update(instruction, frozenset(op.reads), frozenset(op.writes), op.workspace_bytes)
            self._let_go_of(update.reads, update.writes)
            taken = self.bytes + self.held + self.workspace + update.workspace_bytes
            if taken > self.limit or len(self.waiting) == MOST_TOGETHER:
                self.carry_out(self.waiting)
            self.waiting.append(update)
            self._count(update, 1)
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
        self._let_go_of(reads, writes)
        if self.waiting and verb is not Verb.FREE:
            behind = self.bytes + coming - self._freed_behind(index, comes)
            if self.held + max(live, behind + self.workspace) > self.limit:
                self.carry_out(self.waiting)
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
            if verb is not Verb.FREE or self.writes[tensor]:
                break
            if not self.reads[tensor] and (tensor in self.present or tensor in comes):
                freed += self.nbytes[tensor]
        return freed

    def _let_go_of(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Carry out those that cannot change places with what reads and writes these."""
        if any(self.writes[t] for t in reads) or any(self.writes[t] or self.reads[t] for t in writes):
            self.carry_out(
                [
                    u
                    for u in self.waiting
                    if not (u.writes.isdisjoint(reads) and u.writes.isdisjoint(writes) and u.reads.isdisjoint(writes))
                ]
            )

    def _take_away(self, tensor: int) -> int:
        """Count `tensor` as gone; its bytes, if it was there."""
        if tensor not in self.present:
            return 0
        self.present.remove(tensor)
        self.bytes -= self.nbytes[tensor]
        return self.nbytes[tensor]

    def _count(self, update: _Update, change: int) -> None:
        for tensors, counted in ((update.reads, self.reads), (update.writes, self.writes)):
            for tensor in tensors:
                counted[tensor] += change
        self.workspace += change * update.workspace_bytes

    def carry_out(self, updates: Sequence[_Update]) -> None:
        """Carry out these of those that wait, together, and the frees that wait for no other."""
        if not updates:
            return
        gone = set(map(id, updates))
        together = [u for u in self.waiting if id(u) in gone]
        self.waiting = [u for u in self.waiting if id(u) not in gone]
        for update in together:
            self.made.append(update.instruction)
            self._count(update, -1)
        if len(together) > 1:
            self.groups.append(tuple(update.instruction.target for update in together))
        for tensor in [t for t in self.frees if not self.reads[t]]:
            self.made.append(self.frees.pop(tensor))
            self.held -= self.nbytes[tensor]
