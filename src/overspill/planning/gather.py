"""Group optimizer updates to run as one call, where memory allows.

An optimizer's step costs the host as much for one small parameter as for a hundred. A plan that frees each gradient as
soon as possible has its updates scattered. This pass postpones and gathers them, without a higher peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from overspill.core import MOST_TOGETHER, OF_OPS, Graph, Instruction, Schedule, Verb


def gather(
    graph: Graph, schedule: Schedule, updates: Collection[int], live_bytes: Sequence[int], share: float = 1.0
) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    """Return `schedule` with `updates` postponed, and groups of them to run together.

    `live_bytes[i]` is the most on the device during instruction `i`. With the workspaces of a group all live at once,
    memory stays within a `share` of the largest of them, if the plan itself does.
    """
    gathering = _Gathering(graph, schedule, frozenset(updates), int(share * max(live_bytes, default=0)))
    for index, live in enumerate(live_bytes):
        gathering.step(index, live)
    gathering.carry_out(gathering.waiting)
    return replace(schedule, instructions=tuple(gathering.made)), tuple(gathering.groups)


@dataclass(frozen=True)
class _Update:
    """A waiting update: its instruction, its tensors and its workspace in bytes."""

    instruction: Instruction
    reads: frozenset[int]
    writes: frozenset[int]
    workspace_bytes: int


class _Gathering:
    """The schedule so far, with waiting updates and frees that wait for them."""

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
        # Collectives that have been started, with their bytes other than results.
        self.running: dict[int, int] = {}
        self.made: list[Instruction] = []
        self.groups: list[tuple[int, ...]] = []
        self.waiting: list[_Update] = []
        self.frees: dict[int, Instruction] = {}
        self.reads: Counter[int] = Counter()  # by how many that wait
        self.writes: Counter[int] = Counter()
        self.held = self.workspace = 0

    def step(self, index: int, live: int) -> None:
        """Run or postpone instruction `index`, during which `live` bytes are needed."""
        instruction = self.instructions[index]
        verb, target = instruction.verb, instruction.target
        if verb is Verb.FREE and target in self.present and self.reads[target] and not self.writes[target]:
            # Waiting updates read it: its free waits too.
            self.frees[target] = instruction
            self.held += self._take_away(target)
        elif verb is Verb.RUN and target in self.updates:
            # An update waits if memory allows that.
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
        """Run an instruction that is no update, after the waiting updates that must go first."""
        instruction = self.instructions[index]
        verb, target = instruction.verb, instruction.target
        reads: tuple[int, ...]
        writes: tuple[int, ...]
        # Its reads and writes, and tensors that it brings to the device.
        if verb in OF_OPS:
            op = self.ops[target]
            again = verb is Verb.RECOMPUTE
            reads, writes = (op.recompute_reads, op.recompute_writes) if again else (op.reads, op.writes)
            comes = () if verb is Verb.RUN_ON_HOST else writes
        else:  # a transfer has to find, and to leave, a tensor as it was planned
            reads, writes = (), (target,)
            comes = (target,) if verb is Verb.PREFETCH else ()
        # Waiting updates go first where this depends on them, or memory would be exceeded.
        coming = sum(self.nbytes[t] for t in set(comes) - self.present)
        self._let_go_of(reads, writes)
        if self.waiting and verb is not Verb.FREE:
            behind = self.bytes + coming - self._freed_behind(index, comes)
            if self.held + max(live, behind + self.workspace) > self.limit:
                self.carry_out(self.waiting)
        self.made.append(instruction)
        self.present.update(comes)
        self.bytes += coming
        if verb is Verb.START:
            self.running[target] = self.ops[target].workspace_of(instruction.algorithm)
            self.bytes += self.running[target]
        elif verb in OF_OPS:
            self.bytes -= self.running.pop(target, 0)
        if verb is Verb.FREE:
            self._take_away(target)

    def _freed_behind(self, index: int, comes: Collection[int]) -> int:
        """Return the bytes freed right after an instruction, before waiting updates could run again."""
        freed = 0
        for behind in range(index + 1, len(self.instructions)):
            verb, tensor = self.instructions[behind].verb, self.instructions[behind].target
            if verb is not Verb.FREE or self.writes[tensor]:
                break
            if not self.reads[tensor] and (tensor in self.present or tensor in comes):
                freed += self.nbytes[tensor]
        return freed

    def _let_go_of(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Run the waiting updates that conflict with these reads and writes."""
        if any(self.writes[t] for t in reads) or any(self.writes[t] or self.reads[t] for t in writes):
            self.carry_out(
                [
                    u
                    for u in self.waiting
                    if not (u.writes.isdisjoint(reads) and u.writes.isdisjoint(writes) and u.reads.isdisjoint(writes))
                ]
            )

    def _take_away(self, tensor: int) -> int:
        """Remove `tensor` from the device, and return its bytes, or 0 if it was not there."""
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
        """Run these waiting updates as a group, then frees that waited for them."""
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
