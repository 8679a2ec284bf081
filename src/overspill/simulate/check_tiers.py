"""Check the Tiers of a schedule: every Prefetch finds its copy in host memory, and copies there fit the budget.

A copy in the store is in host memory or on the disk, or on its way from there:

    HOST ──write──▶ DISK ──read──▶ COMING ──Prefetch, RunOnHost──▶ HOST

It is written once: the disk keeps it until an Offload or an update on the host makes another, or nothing reads it any
more. It takes host memory from its Offload, or from the begin of its read, until it leaves for the disk or is read for
the last time. An update needs all that it reads and writes there at once. Each step follows another by the same
schedule. This file shares no code with what chooses the stays.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum, auto

from overspill.core import DiskStay, Graph, Instruction, Schedule, Tiers, Verb
from overspill.core.errors import InvalidScheduleError

_PAGE_BYTES = 4096


class _At(Enum):
    HOST = auto()
    DISK = auto()
    COMING = auto()


def check_tiers(graph: Graph, schedule: Schedule, tiers: Tiers) -> int:
    """Check that `tiers` are valid for steps by `schedule`, and return the most bytes of host memory.

    Raises InvalidScheduleError.
    """
    machine = _StoreMachine(graph, schedule, tiers)
    before = dict(machine.at)
    for index, instruction in enumerate(schedule.instructions):
        try:
            machine.execute(index, instruction)
        except InvalidScheduleError as error:
            name = graph.tensors[machine.tensor].name
            raise InvalidScheduleError(f"{schedule.policy}: instruction {index}, the copy of {name}: {error}") from None
    if machine.at != before:
        other = next(t for t in {**before, **machine.at} if before.get(t) is not machine.at.get(t))
        raise InvalidScheduleError(
            f"{schedule.policy}: the copy of {graph.tensors[other].name} ends the step elsewhere than it begins it"
        )
    if machine.peak_bytes > tiers.host_budget_bytes:
        raise InvalidScheduleError(
            f"{schedule.policy}: copies take {machine.peak_bytes} bytes of host memory, over its budget of "
            f"{tiers.host_budget_bytes}"
        )
    return machine.peak_bytes


class _StoreMachine:
    def __init__(self, graph: Graph, schedule: Schedule, tiers: Tiers) -> None:
        self.graph = graph
        self.pages = [-(-max(1, tensor.nbytes) // _PAGE_BYTES) * _PAGE_BYTES for tensor in graph.tensors]
        self.writes: dict[int, list[DiskStay]] = defaultdict(list)
        self.reads: dict[int, list[DiskStay]] = defaultdict(list)
        for stay in tiers.stays:
            self.writes[stay.write].append(stay)
            self.reads[stay.read].append(stay)
        # Copies that no op on the device changes are always there; of others, those that the next step reads.
        on_host = [graph.ops[op] for op in schedule.targets(Verb.RUN_ON_HOST)]
        used = {*schedule.targets(Verb.PREFETCH), *(t for op in on_host for t in op.reads + op.writes)}
        written = {t for op in graph.ops if op not in on_host for t in op.writes}
        between = {*schedule.stored, *(t for t in used - written if graph.tensors[t].persistent)}
        self.unchanged = between - written.union(*(op.writes for op in on_host))
        self.last_uses = _last_uses(graph, schedule, between)
        # Where each is as the step begins follows from what happens to it first.
        happens = [(stay.write, 0, stay.tensor, _At.HOST) for stay in tiers.stays]
        happens += [(stay.read, 1, stay.tensor, _At.DISK) for stay in tiers.stays]
        happens += [(stay.needed, 2, stay.tensor, _At.COMING) for stay in tiers.stays]
        first = {tensor: at for _, _, tensor, at in sorted(happens, reverse=True)}
        self.at = {t: first.get(t, _At.HOST) for t in sorted(between)}
        self.on_disk = self.unchanged | {t for t, at in self.at.items() if at is not _At.HOST}
        self.bytes = sum(self.pages[t] for t, at in self.at.items() if at is not _At.DISK)
        self.peak_bytes = self.bytes
        self.tensor = 0

    def execute(self, index: int, instruction: Instruction) -> None:
        """Carry out what begins before an instruction, and the instruction. Raises InvalidScheduleError."""
        for stay in self.writes[index]:
            self.tensor = stay.tensor
            self._expect(_At.HOST)
            if stay.is_written == (stay.tensor in self.on_disk):
                raise InvalidScheduleError("it is written twice" if stay.is_written else "the disk does not have it")
            self.on_disk.add(stay.tensor)
            self._move(_At.DISK)
        for stay in self.reads[index]:
            self.tensor = stay.tensor
            self._expect(_At.DISK)
            self._move(_At.COMING)
        self.tensor = instruction.target
        used = _on_host(self.graph, instruction)
        if instruction.verb is Verb.OFFLOAD:
            self.on_disk.discard(self.tensor)
            self._move(_At.HOST)
        elif instruction.verb is Verb.PREFETCH:
            self._read("it is not in host memory when it is read")
        for self.tensor in used:
            self._read("it is not in host memory when the host updates it")
            if self.tensor in self.graph.ops[instruction.target].writes:
                self.on_disk.discard(self.tensor)
        for self.tensor in used or (instruction.target,):
            if (index, self.tensor) in self.last_uses and self.tensor not in self.unchanged:
                self.on_disk.discard(self.tensor)
                self._move(None)

    def _read(self, otherwise: str) -> None:
        if not self._is_in_memory():
            raise InvalidScheduleError(otherwise)
        self._move(_At.HOST)

    def _expect(self, at: _At) -> None:
        if (now := self.at.get(self.tensor)) is not at:
            raise InvalidScheduleError(f"it is {'nowhere' if now is None else now.name.lower()}, not {at.name.lower()}")

    def _move(self, to: _At | None) -> None:
        self.bytes += self.pages[self.tensor] * ((to in (_At.HOST, _At.COMING)) - self._is_in_memory())
        if to is None:
            self.at.pop(self.tensor, None)
        else:
            self.at[self.tensor] = to
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _is_in_memory(self) -> bool:
        return self.at.get(self.tensor) in (_At.HOST, _At.COMING)


def _on_host(graph: Graph, instruction: Instruction) -> tuple[int, ...]:
    """Return what an update on the host reads and writes; nothing for other instructions."""
    op = graph.ops[instruction.target] if instruction.verb is Verb.RUN_ON_HOST else None
    return () if op is None else tuple(dict.fromkeys(op.reads + op.writes))


def _last_uses(graph: Graph, schedule: Schedule, between: set[int]) -> set[tuple[int, int]]:
    """Return each instruction that ends a use of a copy, with its tensor, behind which nothing reads it.

    What reads it may be in the next step, if the copy is there `between` steps.
    """
    found: set[tuple[int, int]] = set()
    coming: dict[int, bool] = {}  # whether what is next reads the copy
    for _ in range(2):  # the first time for what the second knows of the next step
        coming = {tensor: is_read for tensor, is_read in coming.items() if tensor in between}
        found.clear()
        for index in range(len(schedule.instructions) - 1, -1, -1):
            instruction = schedule.instructions[index]
            used = _on_host(graph, instruction)
            ended = (instruction.target,) if instruction.verb in (Verb.AWAIT_OFFLOAD, Verb.AWAIT_PREFETCH) else used
            found.update((index, tensor) for tensor in ended if not coming.get(tensor, False))
            if instruction.verb in (Verb.OFFLOAD, Verb.PREFETCH):
                coming[instruction.target] = instruction.verb is Verb.PREFETCH
            coming.update(dict.fromkeys(used, True))
    return found
