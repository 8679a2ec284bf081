"""An estimate in bytes with its bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Bytes between `low` and `high`, most likely `central`."""

    low: int
    central: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.central <= self.high:
            raise ValueError(f"{self.low}, {self.central}, {self.high} bytes do not rise from 0")

    def __add__(self, other: Interval) -> Interval:
        """Return the sum, as if both are at their extremes together."""
        return Interval(self.low + other.low, self.central + other.central, self.high + other.high)

    def times(self, count: int) -> Interval:
        """Return `count` times the interval."""
        return Interval(self.low * count, self.central * count, self.high * count)


NOTHING = Interval(0, 0, 0)
