"""When the host issued what: the part of the clocked machine that a Timeline, which is of the device, leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overspill.core import Device, Schedule, Timeline, Verb


@dataclass(frozen=True)
class Issue:
    """The host was busy issuing instruction number `instruction` in `[start_seconds, end_seconds)`."""

    instruction: int
    start_seconds: float
    end_seconds: float


def issues_of(schedule: Schedule, device: Device, timeline: Timeline) -> Iterator[Issue]:
    """What the host issued of `schedule` on `device`, in order, by the rules of `simulate`, which made `timeline`.

    Where it carries ops out itself, as on a CPU, transfers alone: there compute stands still meanwhile.
    """
    host = 0.0
    for index, instruction in enumerate(schedule.instructions):
        seconds = 0.0
        if instruction.verb in (Verb.OFFLOAD, Verb.PREFETCH):
            seconds = device.transfer_host_seconds
        elif instruction.verb in (Verb.RUN, Verb.RECOMPUTE) and device.runs_behind_host:
            seconds = device.op_overhead_seconds
        if not seconds:
            continue
        if not device.runs_behind_host:
            host = timeline.clock_seconds[index] - seconds
        yield Issue(index, host, host + seconds)
        host += seconds
