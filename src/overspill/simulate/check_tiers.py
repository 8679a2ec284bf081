"""Check the Tiers of a schedule: every Prefetch finds its copy in host memory, and copies there fit the budget.

A copy in the store is in host memory or on the disk, or on its way from there:

    HOST ──write──▶ DISK ──read──▶ COMING ──Prefetch──▶ HOST

It is written once: the disk keeps it until an Offload makes another, or nothing reads it any more. It takes host memory
from its Offload, or from the begin of its read, until it leaves for the disk or is read for the last time. Each step
follows another by the same schedule. This file shares no code with what chooses the stays.
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
        self.pages = [-(-max(1, tensor.nbytes) // _PAGE_BYTES) * _PAGE_BYTES for tensor in graph.tensors]
        self.writes: dict[int, list[DiskStay]] = defaultdict(list)
        self.reads: dict[int, list[DiskStay]] = defaultdict(list)
        for stay in tiers.stays:
            self.writes[stay.write].append(stay)
            self.reads[stay.read].append(stay)
        # Copies that no step changes are always there; of others, those that the next step reads.
        written = {t for op in graph.ops for t in op.writes}
        between = {*schedule.stored, *(t for t in schedule.targets(Verb.PREFETCH) if graph.tensors[t].persistent)}
        self.unchanged = between - written
        self.is_read_next = _read_next(schedule)
        # Where each is as the step begins follows from what happens to it first.
        happens = [(stay.write, 0, stay.tensor, _At.HOST) for stay in tiers.stays]
        happens += [(stay.read, 1, stay.tensor, _At.DISK) for stay in tiers.stays]
        happens += [(stay.needed, 2, stay.tensor, _At.COMING) for stay in tiers.stays]
        first = {tensor: at for _, _, tensor, at in sorted(happens, reverse=True)}
        self.at = {t: first.get(t, _At.HOST) for t in sorted({*schedule.stored, *self.unchanged})}
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
        if instruction.verb is Verb.OFFLOAD:
            self.on_disk.discard(self.tensor)
            self._move(_At.HOST)
        elif instruction.verb is Verb.PREFETCH:
            if self.at.get(self.tensor) not in (_At.HOST, _At.COMING):
                raise InvalidScheduleError("it is not in host memory when it is read")
            self._move(_At.HOST)
        elif self._is_over(index, instruction.verb):
            self.on_disk.discard(self.tensor)
            self._move(None)

    def _is_over(self, index: int, verb: Verb) -> bool:
        """Return whether a transfer ends at instruction `index`, and nothing reads the copy behind it."""
        ends = verb in (Verb.AWAIT_OFFLOAD, Verb.AWAIT_PREFETCH)
        return ends and self.tensor not in self.unchanged and not self.is_read_next[index]

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


def _read_next(schedule: Schedule) -> list[bool]:
    """Return for each instruction whether the next transfer of its tensor is a Prefetch, in this step or the next."""
    stored = set(schedule.stored)
    found = [False] * len(schedule.instructions)
    coming: dict[int, bool] = {}
    for _ in range(2):  # the first time for what the second knows of the next step
        coming = {tensor: is_read for tensor, is_read in coming.items() if tensor in stored}
        for index in range(len(schedule.instructions) - 1, -1, -1):
            instruction = schedule.instructions[index]
            if instruction.verb in (Verb.AWAIT_OFFLOAD, Verb.AWAIT_PREFETCH):
                found[index] = coming.get(instruction.target, False)
            elif instruction.verb in (Verb.OFFLOAD, Verb.PREFETCH):
                coming[instruction.target] = instruction.verb is Verb.PREFETCH
    return found
