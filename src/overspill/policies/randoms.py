"""Random numbers that native code draws as well: SplitMix64.

Twin of native/planning/random.hpp. Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", §3.
"""

from __future__ import annotations

from math import log1p

_ALL = (1 << 64) - 1


class Random:
    """The same numbers for the same seed, everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def uniform(self) -> float:
        """At least 0 and less than 1."""
        return (self._next() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """At least 0 and less than `count`."""
        return int(self.uniform() * count)

    def exponential(self) -> float:
        """Of mean 1."""
        return -log1p(-self.uniform())

    def _next(self) -> int:
        z = self._state = (self._state + 0x9E3779B97F4A7C15) & _ALL
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
        return z ^ (z >> 31)
