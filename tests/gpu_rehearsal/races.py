"""Finds races in the log of the stand-in GPU: vector clocks over the real addresses of copies and kernels.

Two accesses to the same bytes race if one of them writes, they are on different streams, and nothing orders them: no event
that one stream recorded after its access and the other waited for, and no host that knew of the first when it asked for
the second. The host is taken as one: what one of its threads knows, all know. Implicit waits of the legacy stream are not
counted on, for PyTorch's streams have none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from stand_in import KINDS

MOST_RACES = 10_000


@dataclass
class Stream:
    """What one stream was given: for each access its bytes, whether it writes, and its row of the log."""

    knows: Counter[int] = field(default_factory=Counter)
    """Of each stream, how many accesses are done when this one goes on."""
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    writes: list[bool] = field(default_factory=list)
    row: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """Pairs of rows that race, with how many accesses were looked at."""

    races: list[tuple[int, int]]
    accesses: int


class _Clocks:
    """The state of the check; it has a method for each kind of row that it takes into account."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = defaultdict(Stream)
        self.events: dict[int, Counter[int]] = {}
        self.host: Counter[int] = Counter()
        self.races: list[tuple[int, int]] = []
        self.accesses = 0

    def access(self, row: int, number: int, first: int, second: int, nbytes: int) -> None:
        self._touch(row, number, first, nbytes, writes=bool(second))

    def copy(self, row: int, number: int, first: int, second: int, nbytes: int) -> None:
        self._touch(row, number, second, nbytes, writes=False)
        self._touch(row, number, first, nbytes, writes=True)

    def set(self, row: int, number: int, first: int, _: int, nbytes: int) -> None:
        self._touch(row, number, first, nbytes, writes=True)

    def record(self, _row: int, number: int, first: int, _: int, _nbytes: int) -> None:
        self.events[first] = Counter(self._told(number).knows)

    def wait(self, _row: int, number: int, first: int, _: int, _nbytes: int) -> None:
        self._told(number).knows |= self.events.get(first, Counter())

    def event_done(self, _row: int, _number: int, first: int, _: int, _nbytes: int) -> None:
        self.host |= self.events.get(first, Counter())

    def stream_done(self, _row: int, number: int, _first: int, _: int, _nbytes: int) -> None:
        self.host |= self.streams[number].knows

    def device_done(self, _row: int, _number: int, _first: int, _: int, _nbytes: int) -> None:
        for stream in self.streams.values():
            self.host |= stream.knows

    free = device_done
    """cudaFree waits for the device by itself."""

    def _touch(self, row: int, number: int, begin: int, nbytes: int, *, writes: bool) -> None:
        if not begin or not nbytes:
            return
        self.accesses += 1
        stream = self._told(number)
        for other_number, other in self.streams.items():
            if other_number != number and len(self.races) < MOST_RACES:
                unknown = stream.knows[other_number]
                meets = _overlapping(other, unknown, begin, begin + nbytes, writes=writes)
                self.races += [(other.row[i], row) for i in meets]
        stream.begin.append(begin)
        stream.end.append(begin + nbytes)
        stream.writes.append(writes)
        stream.row.append(row)
        stream.knows[number] = len(stream.row)

    def _told(self, number: int) -> Stream:
        """The stream, which now has work that the host gave it after all that the host knows."""
        stream = self.streams[number]
        stream.knows |= self.host
        return stream


def _overlapping(other: Stream, first: int, begin: int, end: int, *, writes: bool) -> Iterable[int]:
    count = len(other.row) - first
    if count <= 0:
        return ()
    if count < 32:
        return [
            i
            for i in range(first, len(other.row))
            if other.begin[i] < end and begin < other.end[i] and (writes or other.writes[i])
        ]
    meets = (np.array(other.begin[first:]) < end) & (np.array(other.end[first:]) > begin)
    if not writes:
        meets &= np.array(other.writes[first:])
    return [first + int(i) for i in meets.nonzero()[0]]


def find_races(log: NDArray[np.void]) -> Found:
    """The races of a log, the first MOST_RACES of them."""
    clocks = _Clocks()
    for row, (kind, _, number, first, second, nbytes) in enumerate(log.tolist()):
        if take := getattr(clocks, KINDS[kind], None):
            take(row, number, first, second, nbytes)
    return Found(clocks.races, clocks.accesses)
