"""Settings of a fine-tune that the user did not give and libraries differ in: how far they move the figure.

The job is recorded again with those that take more, all at once, and with those that take less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overspill.capture.recording.recording import Recording
from overspill.core.errors import RequestError
from overspill.job import Job

from .advice.change import Retrace

LOADING = 0.04
"""The share of the total that loading and preparing weights may leave in the allocator's cache. Where a fine-tune's
allocated bytes are right to 0.1 %, its reserved bytes are up to 3.6 % higher (bench/ground_truth/public.csv)."""


@dataclass(frozen=True)
class Unspecified:
    """The settings that were not given, by option."""

    options: tuple[str, ...]
    more: int
    """The bytes that the job may take more with them."""
    less: int
    """The bytes that the job may take less with them."""

    @property
    def moves(self) -> bool:
        """Whether they move the figure."""
        return bool(self.more or self.less)


def unspecified(retrace: Retrace, taken: int, taken_by: Callable[[Recording], int]) -> Unspecified | None:
    """Return the settings that the user did not give for the job of `retrace`, or None if all are given.

    The job takes `taken` bytes. `taken_by` returns the bytes of a recording.
    """
    job = retrace.job
    if not job.fine_tunes:
        return None
    more, less = _more(job), _less(job)
    most, raised = _with(retrace, more, taken, taken_by)
    least, lowered = _with(retrace, less, taken, taken_by)
    options = tuple(_option(name, (raised | lowered)[name]) for name in raised | lowered)
    return Unspecified(options, max(0, most - taken), max(0, taken - least)) if options else None


def _more(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {name: True for name in ("keep_outputs", "shift_logits") if getattr(job, name) is None}
    if job.attention is None and job.checkpointing:  # without checkpoints nobody would have it spelt out
        found["attention"] = "eager"
    if job.quantize == "4bit":
        found["quantize"] = "4bit-single"
    return found


def _less(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.quantize and job.upcast is None and job.dtype in ("float16", "bfloat16"):
        found["upcast"] = False
    # Other layers keep nothing through checkpoints: allocated bytes of eight small models moved by 2 % at most.
    if job.quantize == "8bit" and job.checkpointing and job.reentrant is None:
        found["reentrant"] = True
    return found


def _with(
    retrace: Retrace, fields: dict[str, Any], taken: int, taken_by: Callable[[Recording], int]
) -> tuple[int, dict[str, Any]]:
    """Return the bytes of the job with `fields`, and the fields that the model has."""
    while fields:
        try:
            return taken_by(retrace.record(replace(retrace.job, **fields))), fields
        except RequestError as error:  # what the model does not have nobody can leave unsaid
            left = {name: value for name, value in fields.items() if name not in error.fields}
            if len(left) == len(fields):
                break
            fields = left
    return taken, {}


def _option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return f"--no-{name.replace('_', '-')}" if value is False else flag if value is True else f"{flag} {value}"
