"""Which live bytes to plan for on a card of a given size: the most whose blocks PyTorch's allocator places in it.

What the allocator takes does not grow steadily with live bytes: of two plans the one that has more live may lie better. So
several are made, for live bytes on a grid, which cards of nearly one size share, and the fastest that fits counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import Plan

T = TypeVar("T")
GRID = 24
"""Sizes between a number and its double."""
HALVINGS = 6
"""How many plans are made to find where they no longer fit."""
UPWARDS = 6
"""How many more are made for more live bytes than the largest plan that was found to fit."""
FROM_FLOOR = 16
"""How many are made from the fewest live bytes upwards, to find the smallest card."""


class Tried(NamedTuple, Generic[T]):
    """A plan that was made, with what else `make` gave, and what it takes of PyTorch's allocator."""

    answer: T
    plan: Plan
    reserved_bytes: int


class CardSearch(Generic[T]):
    """The plans for a card that has `room_bytes` beside its context, made by `make` for live bytes; `reserved` counts them."""

    def __init__(self, room_bytes: int, make: Callable[[int], tuple[T, Plan]], reserved: Callable[[Plan], int]) -> None:
        self._room_bytes = room_bytes
        self._make = make
        self._reserved = reserved
        self._tried: dict[int, Tried[T]] = {}

    def fastest(self) -> Tried[T] | None:
        """The fastest plan that fits; None where none of those that were tried does."""
        try:
            low = self._largest_that_fits()
        except InfeasibleBudget:
            low = 0
        if not low:
            self.from_floor()
        else:
            self._upwards(low)
        fitting = [tried for tried in self._tried.values() if tried.reserved_bytes <= self._room_bytes]
        return min(fitting, key=lambda tried: tried.plan.step_seconds, default=None)

    def from_floor(self) -> tuple[Tried[T], Tried[T], str]:
        """The plan that takes least of the allocator, the one of fewest live bytes, and what holds these up.

        Which are tried does not depend on the room: so a card of the size that an error names will do.
        """
        try:
            fewest, cause = self._at(1), "the policy has no smaller plan"
        except InfeasibleBudget as error:
            fewest, cause = self._at(error.floor_bytes), error.cause
        least = fewest
        for _, live in zip(range(FROM_FLOOR), upwards_from(least.plan.peak_bytes), strict=False):
            if live >= min(least.reserved_bytes, least.plan.unmanaged_peak_bytes):  # where nothing smaller can come
                break
            least = min(self._at(live), least, key=lambda tried: tried.reserved_bytes)
        return least, fewest, cause

    def _largest_that_fits(self) -> int:
        """The most live bytes found with which a plan fits; 0 where there are none. Raises InfeasibleBudget below the fewest."""
        asked, low, over = on_grid(self._room_bytes), 0, self._room_bytes
        for _ in range(HALVINGS):
            tried = self._at(asked)
            excess = tried.reserved_bytes - self._room_bytes
            if excess <= 0:
                low = max(low, asked)
            else:
                over = asked
            less = min(asked, tried.plan.peak_bytes) - excess
            asked = on_grid((low + over) // 2 if low else less)
            if asked <= low:
                break
        return low

    def _upwards(self, low: int) -> None:
        """Try what is above the largest that was found to fit, as far as the room goes."""
        left = UPWARDS
        for live in upwards_from(low):
            if not left or live > self._room_bytes:
                return
            left -= live not in self._tried
            self._at(live)

    def _at(self, live_bytes: int) -> Tried[T]:
        if live_bytes not in self._tried:
            answer, plan = self._make(live_bytes)
            self._tried[live_bytes] = Tried(answer, plan, self._reserved(plan))
        return self._tried[live_bytes]


def on_grid(nbytes: int) -> int:
    """The largest size of the grid that is no more than `nbytes`; 1 where that is nothing."""
    return _size(math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9))


def upwards_from(nbytes: int) -> Iterator[int]:
    """The sizes of the grid above `nbytes`, the smallest first."""
    number = math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9)
    while True:
        number += 1
        yield _size(number)


def _size(number: int) -> int:
    return math.ceil(2 ** (number / GRID))
