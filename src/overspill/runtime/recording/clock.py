"""Clocks of a record, on the host and on a device.

A device runs asynchronously: the host learns only later when work was done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """When work given to a stream is done; on the CPU at once."""

    def mark(self, stream: Any = None) -> Any:
        """A mark after all work given to `stream`, or else to compute."""

    def is_past(self, mark: Any) -> bool:
        """Whether all work before the mark is done."""

    def seconds(self, mark: Any) -> float:
        """The time of a mark that has passed, in seconds of the record."""

    def give_back(self, mark: Any) -> None:
        """Recycle a mark."""

    def settle(self) -> None:
        """Wait until all marks have passed."""


class HostClock:
    """The CPU's clock, whose marks are seconds. Work is done when its call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self, stream: Any = None) -> float:  # noqa: ARG002 - it has none
        """Now."""
        return self._now()

    def is_past(self, mark: float) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def seconds(self, mark: float) -> float:
        """Itself."""
        return mark

    def give_back(self, mark: float) -> None:
        """Nothing to do."""

    def settle(self) -> None:
        """Nothing to wait for."""
