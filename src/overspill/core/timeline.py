"""The Timeline: when every instruction started and ended, and what the compute stream waited for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from .saved import Saved
from .schedule import Verb


class Stream(StrEnum):
    """Where an instruction runs: one compute stream and one copy stream each way."""

    COMPUTE = "compute"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class Event:
    """Instruction number `instruction` of the schedule, on `stream` in `[start_seconds, end_seconds)`."""

    instruction: int
    verb: Verb
    target: int
    stream: Stream
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Stall:
    """Seconds that the compute stream waited at `instruction`, and for what."""

    instruction: int
    start_seconds: float
    end_seconds: float
    cause: str


@dataclass(frozen=True)
class Timeline(Saved):
    """One step on the clock. `live_bytes[i]` is the most that was on the device during instruction `i`."""

    events: tuple[Event, ...]
    stalls: tuple[Stall, ...]
    live_bytes: tuple[int, ...]
    step_seconds: float

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that were on the device at once."""
        return max(self.live_bytes, default=0)

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds in which the compute stream ran ops."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is Stream.COMPUTE), 0.0)

    @cached_property
    def exposed_transfer_seconds(self) -> float:
        """Seconds in which the compute stream waited for a transfer."""
        return sum((stall.end_seconds - stall.start_seconds for stall in self.stalls), 0.0)

    @cached_property
    def transfer_seconds(self) -> float:
        """Seconds in which either copy stream moved bytes, directions added up."""
        return sum((e.end_seconds - e.start_seconds for e in self.events if e.stream is not Stream.COMPUTE), 0.0)

    @property
    def overlapped_seconds(self) -> float:
        """Transfer seconds that compute hid."""
        return max(0.0, self.transfer_seconds - self.exposed_transfer_seconds)
