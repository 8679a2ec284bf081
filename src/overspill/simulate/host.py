"""Times at which the host issued instructions, which a Timeline leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overspill.core import OF_OPS, Device, Schedule, Timeline, Verb


@dataclass(frozen=True)
class Issue:
    """The host issues instruction `instruction` from `start_seconds` until before `end_seconds`."""

    instruction: int
    start_seconds: float
    end_seconds: float


def issues_of(schedule: Schedule, device: Device, timeline: Timeline) -> Iterator[Issue]:
    """Yield the times at which the host issues instructions of `schedule`, in order.

    `timeline` is the result of `simulate` for it on `device`. A CPU runs ops itself, so only its transfers are issued:
    compute stands still meanwhile.
    """
    host = 0.0
    started: set[int] = set()  # collectives that run
    for index, instruction in enumerate(schedule.instructions):
        seconds = 0.0
        if instruction.verb in (Verb.OFFLOAD, Verb.PREFETCH, Verb.RUN_ON_HOST):
            seconds = device.transfer_host_seconds
        elif instruction.verb in OF_OPS and device.runs_behind_host and instruction.target not in started:
            seconds = device.op_overhead_seconds
        if instruction.verb is Verb.START:
            started.add(instruction.target)
        elif instruction.verb in OF_OPS:
            started.discard(instruction.target)
        if not seconds:
            continue
        if not device.runs_behind_host:
            host = timeline.clock_seconds[index] - seconds
        yield Issue(index, host, host + seconds)
        host += seconds
