"""Log figures from your own training loop to Python's `logging` or to TensorBoard."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

from overspill.core.errors import RequestError
from overspill.core.units import format_bytes, format_seconds

from .figures import PREFIX, StepFigures

_LOG = logging.getLogger("overspill")


class _EachSteps(ABC):
    """Called after each step; gives figures to `_tell` every `every` steps."""

    def __init__(self, model: Any, every: int) -> None:
        """Raise RequestError for an `every` below 1."""
        if every < 1:
            raise RequestError(f"every={every} is no number of steps; give 1 or more")
        self._figures, self._every, self._done = StepFigures(model), every, 0

    def __call__(self) -> None:
        """Count a step, and log if it is time. Raises RequestError if Overspill took no part in it."""
        self._figures.step()
        self._done += 1
        if self._done % self._every == 0:
            self._tell(self._done, self._figures.take())

    @abstractmethod
    def _tell(self, step: int, figures: dict[str, float]) -> None:
        """Log the figures of the steps up to this one."""


class StepLogger(_EachSteps):
    """Logs a line every `every` steps, with Python's `logging`.

    Call `log = StepLogger(model, every=100)` after each step; the line is at INFO of the logger "overspill".
    """

    def __init__(self, model: Any, every: int = 1) -> None:
        """Log the figures of `model`, as of StepFigures. Raises RequestError."""
        super().__init__(model, every)

    def _tell(self, step: int, figures: dict[str, float]) -> None:
        parts = [
            f"{name.removeprefix(PREFIX).rpartition('_')[0].replace('_', ' ')} "
            + (format_bytes(int(value)) if name.endswith("bytes") else format_seconds(value))
            for name, value in figures.items()
        ]
        _LOG.info("step %d: %s", step, ", ".join(parts))


class TensorBoardWriter(_EachSteps):
    """Writes scalars to TensorBoard every `every` steps.

    Call `write = TensorBoardWriter(model, SummaryWriter())` after each step.
    """

    def __init__(self, model: Any, writer: Any, every: int = 1) -> None:
        """Write the figures of `model`, as of StepFigures, by `writer.add_scalar`. Raises RequestError."""
        super().__init__(model, every)
        self._writer = writer

    def _tell(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
