"""The disk below a store, on the clock: its reads and writes, and the host memory that they wait for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping

from overspill.core import COPIES, Device, DiskStay, Event, Instruction, Stream, Tiers, Verb

Times = Mapping[tuple[Stream, int], float]


class DiskLane:
    """The disk, which reads one copy after another, over several steps, and writes each as it may leave.

    Reads and writes share its time: what comes first in the program has it first. Host memory is taken when a copy
    begins to arrive from either side. It is given back when the copy has been written, or is needed no more. What needs
    more than is free waits.
    """

    def __init__(self, device: Device, tiers: Tiers, nbytes: list[int]) -> None:
        self.device = device
        self.nbytes = nbytes
        self.events: list[Event] = []
        self._writes: dict[int, list[DiskStay]] = defaultdict(list)
        self._reads: dict[int, list[DiskStay]] = defaultdict(list)
        self._ends: dict[int, list[int]] = defaultdict(list)
        for stay in tiers.stays:
            self._writes[stay.write].append(stay)
            self._reads[stay.read].append(stay)
        for end, tensor in tiers.ends:
            self._ends[end].append(tensor)
        self.starts, self.ends = self._writes.keys() | self._reads.keys(), frozenset(self._ends)
        """Instructions before which it starts something, and behind which copies are needed no more."""
        self._memory = _HostMemory(tiers.host_budget_bytes, tiers.start_bytes)
        self._busy: list[tuple[float, float]] = []
        """When it has work: disjoint spans in order, in seconds."""
        self._read_free = 0.0
        self._back: dict[int, float] = {}
        """When a copy is in host memory again."""

    def before(self, index: int, now: float, arrival: Times, updated: Times) -> None:
        """Start at `now` what is to start before instruction `index`.

        `arrival` is when each transfer ends, `updated` when the host is done with a copy.
        """
        for stay in self._writes[index]:
            end = max(now, _over(stay.tensor, arrival, updated))
            if stay.is_written:
                end = self._work(index, Verb.OFFLOAD, stay.tensor, end)
            self._memory.give(end, self.nbytes[stay.tensor])
        for stay in self._reads[index]:
            begin = self._memory.take(max(now, self._read_free), self.nbytes[stay.tensor])
            self._read_free = self._back[stay.tensor] = self._work(index, Verb.PREFETCH, stay.tensor, begin)
        self._memory.forget_before(now)

    def behind(self, index: int, arrival: Times, updated: Times) -> None:
        """Give back the host memory of copies that are needed no more behind instruction `index`."""
        for tensor in self._ends[index]:
            self._memory.give(_over(tensor, arrival, updated), self.nbytes[tensor])

    def back(self, tensor: int) -> float:
        """Return when the copy of a tensor is in host memory again."""
        return self._back.get(tensor, 0.0)

    def ready(self, instruction: Instruction, start: float) -> float:
        """Return when a transfer that could begin at `start` finds its copy, or space for it, in host memory."""
        if instruction.verb is Verb.OFFLOAD:
            return self._memory.take(start, self.nbytes[instruction.target])
        return max(start, self.back(instruction.target))

    def next_step(self, seconds: float) -> list[Event]:
        """Go on to the next step, which begins `seconds` behind this one, and return the events of this one."""
        made, self.events = self.events, []
        self._read_free -= seconds
        self._back = {tensor: until - seconds for tensor, until in self._back.items()}
        self._busy = [(start - seconds, end - seconds) for start, end in self._busy if end > seconds]
        self._memory.next_step(seconds)
        return made

    def _work(self, index: int, verb: Verb, tensor: int, begin: float) -> float:
        """Give a copy the time from `begin` on that no other has, and return when it is done."""
        left = (self.device.disk_write_seconds if verb is Verb.OFFLOAD else self.device.disk_read_seconds)(
            self.nbytes[tensor]
        )
        first = at = bisect_right(self._busy, begin, key=lambda span: span[1])
        now, joined = begin, begin
        if at < len(self._busy) and self._busy[at][0] <= begin:
            joined, now, at = *self._busy[at], at + 1
        while left > 0:
            spent = min(left, self._busy[at][0] - now) if at < len(self._busy) else left
            if spent:
                self.events.append(Event(index, verb, tensor, Stream.DISK, now, now + spent))
            now, left = now + spent, left - spent
            if left > 0:
                now, at = self._busy[at][1], at + 1
        self._busy[first:at] = [(joined, now)]
        return now


class _HostMemory:
    """Host memory over time, `used` bytes of `budget` at first."""

    def __init__(self, budget: int, used: int) -> None:
        self._budget = budget
        self._last = used
        """The bytes behind all changes that are known."""
        self._changes: list[tuple[float, int]] = []

    def give(self, when: float, nbytes: int) -> None:
        """Have so many bytes less in use from `when` on."""
        insort(self._changes, (when, -nbytes))
        self._last -= nbytes

    def take(self, now: float, nbytes: int) -> float:
        """Take bytes as soon from `now` on as they stay free of others, and return when that is."""
        used, when = self._last, now
        for at in range(len(self._changes) - 1, -1, -1):
            time, change = self._changes[at]
            if used + nbytes > self._budget:  # behind this change: only the next one makes space
                when = max(now, self._changes[min(at + 1, len(self._changes) - 1)][0])
                break
            if time <= now:
                break
            used -= change
        else:
            if used + nbytes > self._budget and self._changes:
                when = max(now, self._changes[0][0])
        insort(self._changes, (when, nbytes))
        self._last += nbytes
        return when

    def forget_before(self, now: float) -> None:
        """Forget when bytes changed before `now`, which nothing asks for any more."""
        del self._changes[: bisect_left(self._changes, (now, 0))]

    def next_step(self, seconds: float) -> None:
        self._changes = [(when - seconds, change) for when, change in self._changes]


def _over(tensor: int, arrival: Times, updated: Times) -> float:
    """Return when the last transfer and the last update of a copy are over."""
    return max(times.get((stream, tensor), 0.0) for times in (arrival, updated) for stream in COPIES)
