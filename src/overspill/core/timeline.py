"""The Timeline: start and end of every instruction, and waits of the compute stream."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from .graph import CollectiveKind
from .saved import Saved
from .schedule import Verb

HOST = "the host, which issues ops and transfers"
"""The cause of a stall that no transfer causes."""


_COLLECTIVES = frozenset(CollectiveKind)


class Stream(StrEnum):
    """Where an instruction runs: the compute stream, a copy stream for each direction, or that of collectives.

    Or the host, which updates what is in the store; or the disk below that, where a write is an Offload and a read a
    Prefetch.
    """

    COMPUTE = "compute"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    COMMUNICATION = "communication"
    HOST_UPDATE = "host update"
    DISK = "disk"


COPIES = (Stream.OFFLOAD, Stream.PREFETCH)
"""The copy streams."""


@dataclass(frozen=True)
class Event:
    """One instruction on `stream` from `start_seconds` until before `end_seconds`."""

    instruction: int
    verb: Verb
    target: int
    stream: Stream
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Stall:
    """A wait of the compute stream at `instruction`, in seconds, and its cause."""

    instruction: int
    start_seconds: float
    end_seconds: float
    cause: str


@dataclass(frozen=True)
class Timeline(Saved):
    """One step on the clock: events, stalls and memory use."""

    events: tuple[Event, ...]
    stalls: tuple[Stall, ...]
    live_bytes: tuple[int, ...]
    """The most bytes on the device during each instruction."""
    step_seconds: float
    clock_seconds: tuple[float, ...] = ()
    """The time on the compute stream after each instruction."""

    @cached_property
    def peak_bytes(self) -> int:
        """Peak bytes on the device."""
        return max(self.live_bytes, default=0)

    @cached_property
    def average_bytes(self) -> float:
        """Bytes on the device, averaged over the time of the step."""
        if not self.step_seconds:
            return float(self.peak_bytes)
        begun, held = 0.0, 0.0
        for nbytes, ended in zip(self.live_bytes, self.clock_seconds, strict=True):
            held += nbytes * (ended - begun)
            begun = ended
        return held / self.step_seconds

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds in which the compute stream runs ops."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is Stream.COMPUTE), 0.0)

    @cached_property
    def exposed_transfer_seconds(self) -> float:
        """Seconds in which the compute stream waits for a transfer, a collective or the host."""
        return sum((stall.end_seconds - stall.start_seconds for stall in self.stalls), 0.0)

    @cached_property
    def exposed_communication_seconds(self) -> float:
        """Seconds in which the compute stream waits for a collective."""
        waits = self.wait_seconds.items()
        return sum((spent for cause, spent in waits if cause.partition(" of ")[0] in _COLLECTIVES), 0.0)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of the step; those of collectives, the host and the disk only if the step has any."""
        used = {event.stream for event in self.events}
        return tuple(stream for stream in Stream if stream in used or stream in (Stream.COMPUTE, *COPIES))

    @cached_property
    def communication_seconds(self) -> float:
        """Seconds in which collectives run."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is Stream.COMMUNICATION), 0.0)

    @cached_property
    def host_update_seconds(self) -> float:
        """Seconds in which the host updates what is in the store; some may be of the step before."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is Stream.HOST_UPDATE), 0.0)

    @cached_property
    def disk_seconds(self) -> float:
        """Seconds in which the disk below the store reads or writes."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is Stream.DISK), 0.0)

    @cached_property
    def host_seconds(self) -> float:
        """Seconds in which the compute stream waits for the host."""
        return self.wait_seconds.get(HOST, 0.0)

    @cached_property
    def wait_seconds(self) -> dict[str, float]:
        """Seconds that the compute stream waits, by cause, such as `prefetch of relu_3`."""
        found = defaultdict[str, float](float)
        for stall in self.stalls:
            found[stall.cause] += stall.end_seconds - stall.start_seconds
        return dict(found)

    @cached_property
    def transfer_seconds(self) -> float:
        """Seconds in which a copy stream moves bytes, both directions added up."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream in COPIES), 0.0)

    @cached_property
    def overlapped_seconds(self) -> float:
        """Seconds of compute while a copy stream moves bytes (Dymem Fig. 14)."""
        overlapped, transfers = 0.0, self._transfer_spans
        first = 0
        for event in self.events:
            if event.stream is not Stream.COMPUTE:
                continue
            while first < len(transfers) and transfers[first][1] <= event.start_seconds:
                first += 1
            for start, end in transfers[first:]:
                if start >= event.end_seconds:
                    break
                overlapped += min(end, event.end_seconds) - max(start, event.start_seconds)
        return overlapped

    @cached_property
    def _transfer_spans(self) -> list[tuple[float, float]]:
        """Times at which a copy stream is busy: disjoint spans in order, in seconds."""
        spans: list[tuple[float, float]] = []
        for start, end in sorted((e.start_seconds, e.end_seconds) for e in self.events if e.stream in COPIES):
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        return spans
