"""The disk below a store, on the clock: its reads and writes, and the host memory that they wait for."""

from __future__ import annotations

import heapq
from collections import defaultdict

from overspill.core import Device, DiskStay, Event, Instruction, Stream, Tiers, Verb


class DiskLane:
    """The disk, which reads and writes one copy after another, over several steps.

    Host memory is taken when a copy begins to arrive from either side. It is given back when the copy has been written
    to the disk, or is needed no more. What needs more than is free waits.
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
        self._budget = tiers.host_budget_bytes
        self._used = tiers.start_bytes
        self._released: list[tuple[float, int]] = []
        self._free = 0.0
        self._back: dict[int, float] = {}
        """When a copy is in host memory again."""

    def before(self, index: int, now: float, arrival: dict[tuple[Stream, int], float]) -> None:
        """Start at `now` what is to start before instruction `index`; `arrival` is when each transfer ends."""
        for stay in self._writes[index]:
            begin = max(now, arrival.get((Stream.OFFLOAD, stay.tensor), 0.0))
            end = begin
            if stay.is_written:
                end = self._busy(index, Verb.OFFLOAD, stay.tensor, begin)
            self._give(end, stay.tensor)
        for stay in self._reads[index]:
            begin = self._space(stay.tensor, now)
            self._back[stay.tensor] = self._busy(index, Verb.PREFETCH, stay.tensor, begin)

    def behind(self, index: int, arrival: dict[tuple[Stream, int], float]) -> None:
        """Give back the host memory of copies that are needed no more behind instruction `index`."""
        for tensor in self._ends[index]:
            ended = (arrival.get((stream, tensor), 0.0) for stream in (Stream.OFFLOAD, Stream.PREFETCH))
            self._give(max(ended), tensor)

    def ready(self, instruction: Instruction, start: float) -> float:
        """Return when a transfer that could begin at `start` finds its copy, or space for it, in host memory."""
        if instruction.verb is Verb.OFFLOAD:
            return self._space(instruction.target, start)
        return max(start, self._back.get(instruction.target, 0.0))

    def next_step(self, seconds: float) -> list[Event]:
        """Go on to the next step, which begins `seconds` behind this one, and return the events of this one."""
        made, self.events = self.events, []
        self._free -= seconds
        self._back = {tensor: until - seconds for tensor, until in self._back.items()}
        self._released = [(until - seconds, nbytes) for until, nbytes in self._released]
        return made

    def _busy(self, index: int, verb: Verb, tensor: int, begin: float) -> float:
        seconds = self.device.disk_write_seconds if verb is Verb.OFFLOAD else self.device.disk_read_seconds
        begin = max(begin, self._free)
        self._free = begin + seconds(self.nbytes[tensor])
        self.events.append(Event(index, verb, tensor, Stream.DISK, begin, self._free))
        return self._free

    def _give(self, when: float, tensor: int) -> None:
        heapq.heappush(self._released, (when, self.nbytes[tensor]))

    def _space(self, tensor: int, now: float) -> float:
        """Take host memory for a copy, and return when it is there."""
        while self._released and (self._released[0][0] <= now or self._used + self.nbytes[tensor] > self._budget):
            when, nbytes = heapq.heappop(self._released)
            self._used -= nbytes
            now = max(now, when)
        self._used += self.nbytes[tensor]
        return now
