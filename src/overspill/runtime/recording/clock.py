"""The clocks of a record: who gives work to a device does not know when it is done, but can ask later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Tells when what a stream has been given is done: on the CPU at once."""

    def mark(self, stream: Any = None) -> Any:
        """Here: behind all that `stream`, or else compute, has been given."""

    def is_past(self, mark: Any) -> bool:
        """Whether what stands before it is done."""

    def seconds(self, mark: Any) -> float:
        """When that was, in seconds of the record."""

    def give_back(self, mark: Any) -> None:
        """Nobody asks for this one any more."""

    def settle(self) -> None:
        """Wait until all marks are past."""


class HostClock:
    """The CPU's clock, whose marks are seconds.

    Work is done when its call returns.
    """

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
