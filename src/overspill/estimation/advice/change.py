"""A piece of advice, and a change before it has been tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from overspill.capture.recording.recording import Recording
from overspill.job import Job

COMPILED = "overspill.compile(model, budget=…)"
"""Overspill's own change; the ellipsis becomes the budget of the advice."""
CALLBACK = "callbacks=[overspill.callbacks.Budget(…)]"
"""The same as an argument of Trainer."""


class Price(IntEnum):
    """The cost of a change to the user, the cheapest first."""

    NOTHING = 0
    PRECISION = 1
    TIME = 2
    RESULTS = 3
    HARDWARE = 4


@dataclass(frozen=True)
class Advice:
    """One change that helps: what it is, costs, and needs.

    Bytes are of each of `gpus`. Fields that were not computed are None.
    """

    what: str
    """The change."""
    cost: str = ""
    """Its cost in words."""
    price: Price = Price.NOTHING
    minimum_capacity_bytes: int | None = None
    """The smallest device memory on which the changed job survives, by its estimate."""
    total_bytes: int | None = None
    """The bytes that the changed job takes, by its estimate."""
    fits: bool | None = None
    step_seconds: float | None = None
    """Simulated seconds of a step; None where `unsimulated` says why."""
    unsimulated: str = ""
    """What of a step has no simulated time; empty if all has."""
    slowdown: float | None = None
    """The step time relative to the unmanaged step, for Overspill's own plans alone."""
    gpus: int = 1
    host_bytes: int | None = None
    """Bytes that the change keeps in host memory."""
    budget_bytes: int | None = None
    """The budget to name, for Overspill's own plans alone."""
    trainer: str = ""
    """The arguments of transformers' TrainingArguments, or of Trainer, that make the change; may be empty."""
    python: str = ""
    """The line of Python that makes it, for Overspill's own plans alone."""
    before: str = ""
    """The line that comes first, before CUDA is used."""


@dataclass(frozen=True)
class Change:
    """A change of a job's `fields`."""

    what: str
    cost: str
    price: Price
    fields: Mapping[str, Any]
    weights: float = 1.0
    """The share of the model's bytes that certainly stays on the device."""
    state: float = 1.0
    """The share of the optimizer state's bytes that certainly stays on the device."""
    of_update: bool = False
    """Whether it changes only the optimizer's state and its update."""
    trainer: str = ""
    """As in `Advice`."""

    def edit(self, job: Job) -> Job:
        """Return `job` with the change made."""
        return replace(job, **self.fields)


@dataclass(frozen=True)
class Retrace:
    """A job, and the function that records a changed one.

    The changed job may have other training settings or another batch size.
    """

    job: Job
    record: Callable[[Job], Recording]
