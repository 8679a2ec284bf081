"""Search for the fastest plan whose segments fit on a card.

What the allocator takes does not grow steadily with live bytes: of two plans the one that has more live may lie better.
So several are made, for live bytes on a grid, which cards of nearly one size share, and the fastest that fits counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import Plan

T = TypeVar("T")
GRID = 24
"""Grid sizes between a number and its double."""
HALVINGS = 6
"""Plans made to find where they no longer fit."""
UPWARDS = 6
"""Further plans made for more live bytes than the largest plan found to fit."""
FROM_FLOOR = 16
"""Plans made from the fewest live bytes upwards, to find the smallest card."""


class Tried(NamedTuple, Generic[T]):
    """A placed plan, and what else `make` gave."""

    answer: T
    plan: Plan


class CardSearch(Generic[T]):
    """Plans for a card with `room_bytes` besides its context.

    `make` makes them for live bytes; `placed` adds the bytes that the allocator takes.
    """

    def __init__(self, room_bytes: int, make: Callable[[int], tuple[T, Plan]], placed: Callable[[Plan], Plan]) -> None:
        self._room_bytes = room_bytes
        self._make = make
        self._placed = placed
        self._tried: dict[int, Tried[T]] = {}

    def fastest(self) -> Tried[T] | None:
        """The fastest plan tried that fits, or None."""
        try:
            low = self._largest_that_fits()
        except InfeasibleBudget:
            low = 0
        if not low:
            self.from_floor()
        else:
            self._upwards(low)
        fitting = [tried for tried in self._tried.values() if tried.plan.taken_bytes <= self._room_bytes]
        return min(fitting, key=lambda tried: tried.plan.step_seconds, default=None)

    def from_floor(self) -> tuple[Tried[T], Tried[T], str]:
        """The plan with the least reserved bytes, that with the fewest live, and why.

        The third is what holds the live bytes up. The plans tried do not depend on the room: so a card of the size that
        an error names will do.
        """
        try:
            fewest, cause = self._at(1), "the policy has no smaller plan"
        except InfeasibleBudget as error:
            fewest, cause = self._at(error.floor_bytes), error.cause
        least = fewest
        for _, live in zip(range(FROM_FLOOR), upwards_from(least.plan.peak_bytes), strict=False):
            if live >= min(least.plan.taken_bytes, least.plan.unmanaged_peak_bytes):  # where nothing smaller can come
                break
            least = min(self._at(live), least, key=lambda tried: tried.plan.taken_bytes)
        return least, fewest, cause

    def _largest_that_fits(self) -> int:
        """The most live bytes found with which a plan fits, or 0.

        Raises InfeasibleBudget below the fewest.
        """
        asked, low, over = on_grid(self._room_bytes), 0, self._room_bytes
        for _ in range(HALVINGS):
            tried = self._at(asked)
            excess = tried.plan.taken_bytes - self._room_bytes
            if excess <= 0:
                low = max(low, asked)
            else:
                over = asked
            # Bisect; before anything fits, go down by the excess.
            less = min(asked, tried.plan.peak_bytes) - excess
            asked = on_grid((low + over) // 2 if low else less)
            if asked <= low:
                break
        return low

    def _upwards(self, low: int) -> None:
        """Try larger live bytes than the largest found to fit, within the room."""
        left = UPWARDS
        for live in upwards_from(low):
            if not left or live > self._room_bytes:
                return
            left -= live not in self._tried
            self._at(live)

    def _at(self, live_bytes: int) -> Tried[T]:
        if live_bytes not in self._tried:
            answer, plan = self._make(live_bytes)
            self._tried[live_bytes] = Tried(answer, self._placed(plan))
        return self._tried[live_bytes]


def on_grid(nbytes: int) -> int:
    """The largest grid size up to `nbytes`; at least 1."""
    return _size(math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9))


def upwards_from(nbytes: int) -> Iterator[int]:
    """Grid sizes above `nbytes`, ascending."""
    number = math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9)
    while True:
        number += 1
        yield _size(number)


def _size(number: int) -> int:
    return math.ceil(2 ** (number / GRID))
