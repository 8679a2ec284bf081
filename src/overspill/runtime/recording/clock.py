"""Clocks of a record, on the host and on a device.

A device runs asynchronously: the host learns only later when work was done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Tells when the work given to a stream is done; on the CPU it is done at once."""

    def mark(self, stream: Any = None) -> Any:
        """Return a mark after all work given to `stream`, or to compute if None."""

    def is_past(self, mark: Any) -> bool:
        """Return whether all work before the mark is done."""

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark that has passed, in seconds of the record."""

    def give_back(self, mark: Any) -> None:
        """Recycle a mark."""

    def settle(self) -> None:
        """Wait until all marks have passed."""


class HostClock:
    """The clock of the CPU, whose marks are seconds. Work is done when its call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self, stream: Any = None) -> float:  # noqa: ARG002 - it has none
        """Return the present time in seconds of the record."""
        return self._now()

    def is_past(self, mark: float) -> bool:  # noqa: ARG002
        """Return True: work is done when its call returns."""
        return True

    def seconds(self, mark: float) -> float:
        """Return the mark itself."""
        return mark

    def give_back(self, mark: float) -> None:
        """Do nothing: marks are plain numbers."""

    def settle(self) -> None:
        """Do nothing: all marks have passed."""
