"""A piece of advice, and a change before it has been tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from overspill.capture.recording.recording import Recording
from overspill.job import Job


class Price(IntEnum):
    """What a change costs the user, the cheapest first."""

    NOTHING = 0
    PRECISION = 1
    TIME = 2
    RESULTS = 3
    HARDWARE = 4


@dataclass(frozen=True)
class Advice:
    """One change that helps: what it is, costs, and needs.

    `what` to change, its `cost` in words, and what the job needs then, where that was worked out.
    `minimum_capacity_bytes` and `total_bytes` are those of an estimate with the change made. `step_seconds` are
    simulated, and `slowdown` is to the unmanaged step: of Overspill's own plans alone. `host_bytes` are what it keeps
    in the memory of the host. Bytes are of each of `gpus`.
    """

    what: str
    cost: str = ""
    price: Price = Price.NOTHING
    minimum_capacity_bytes: int | None = None
    total_bytes: int | None = None
    fits: bool | None = None
    step_seconds: float | None = None
    slowdown: float | None = None
    gpus: int = 1
    host_bytes: int | None = None


@dataclass(frozen=True)
class Change:
    """A change of a job's `fields`.

    `weights` and `state` are the shares of the model's and of the optimizer's bytes that certainly stay on the device.
    """

    what: str
    cost: str
    price: Price
    fields: Mapping[str, Any]
    weights: float = 1.0
    state: float = 1.0

    def edit(self, job: Job) -> Job:
        """`job` with the change made."""
        return replace(job, **self.fields)


@dataclass(frozen=True)
class Retrace:
    """A job, and how to record a changed one.

    It may be trained otherwise, or at another batch size.
    """

    job: Job
    record: Callable[[Job], Recording]
