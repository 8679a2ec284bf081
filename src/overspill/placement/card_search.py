"""Search for the fastest plan whose segments fit on a card.

What the allocator takes does not grow steadily with live bytes: of two plans the one that has more live may lie better.
So several are made, for live bytes on a grid, which cards of nearly one size share, and the fastest that fits counts.
Where plans begin to fit is looked for with little effort; those about there are then made with all of it, at once on as
many threads as there are cores. How many these are does not change what is found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import islice
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import Plan

T = TypeVar("T")
R = TypeVar("R")
GRID = 24
"""Grid sizes between a number and its double."""
HALVINGS = 6
"""Plans made to find where they no longer fit."""
UPWARDS = 6
"""Further plans made for more live bytes than the largest plan found to fit."""
FROM_FLOOR = 16
"""Plans made from the fewest live bytes upwards, to find the smallest card."""
MOST_FLOORS = 8
"""Floors that are followed to the smallest plan."""
HOPE = 1.1
"""Where the plan of fewest live bytes takes more than so many times the room, one of more is not looked for."""
FIRST_EFFORT = 0.2
"""Share of the effort with which plans are made to find where they no longer fit."""


class Tried(NamedTuple, Generic[T]):
    """A placed plan, and what else `make` gave."""

    answer: T
    plan: Plan


class CardSearch(Generic[T]):
    """Plans for a card with `room_bytes` besides its context.

    `make` makes them for live bytes, with a share of the usual effort; `placed` adds the bytes that the allocator takes.
    """

    def __init__(
        self, room_bytes: int, make: Callable[[int, float], tuple[T, Plan]], placed: Callable[[Plan], Plan]
    ) -> None:
        self._room_bytes = room_bytes
        self._make = make
        self._placed = placed
        self._tried: dict[tuple[int, float], Tried[T]] = {}

    def fastest(self) -> Tried[T] | None:
        """The fastest plan tried that fits, or None."""
        try:
            low = self._largest_that_fits()
        except InfeasibleBudget:
            low = 0
        if not low:
            least, *_ = self.from_floor(alone=True)
            if least.plan.taken_bytes <= HOPE * self._room_bytes:
                self.from_floor()
        elif self._at(low, FIRST_EFFORT).plan.slowdown > 1:
            beyond = (live for live in islice(upwards_from(low), UPWARDS) if live <= self._room_bytes)
            self._at_all([low, *beyond])
        # In the order of live bytes, for threads add them in any.
        fitting = [
            tried
            for _, tried in sorted(self._tried.items(), key=itemgetter(0))
            if tried.plan.taken_bytes <= self._room_bytes
        ]
        return min(fitting, key=lambda tried: tried.plan.step_seconds, default=None)

    def from_floor(self, *, alone: bool = False) -> tuple[Tried[T], Tried[T], str]:
        """The plan with the least reserved bytes, that with the fewest live, and why; or where it is `alone` this one.

        The third is what holds the live bytes up. The plans tried do not depend on the room: so a card of the size that
        an error names will do.
        """
        floor, fewest, cause = least_of(self._at)
        if alone:
            return fewest, fewest, cause
        # Beyond what the first takes, nothing smaller can come.
        most = min(fewest.plan.taken_bytes, fewest.plan.unmanaged_peak_bytes)
        beyond = (live for live in islice(upwards_from(max(floor, fewest.plan.peak_bytes)), FROM_FLOOR) if live < most)
        others = self._at_all(beyond)
        return min([fewest, *others], key=lambda tried: tried.plan.taken_bytes), fewest, cause

    def _largest_that_fits(self) -> int:
        """The most live bytes found with which a plan fits, or 0.

        Raises InfeasibleBudget below the fewest.
        """
        asked, low, over = on_grid(self._room_bytes), 0, self._room_bytes
        for _ in range(HALVINGS):
            tried = self._at(asked, FIRST_EFFORT)
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

    def _at_all(self, asked: Iterable[int]) -> list[Tried[T]]:
        """The plans for these live bytes, made at once; the search frees Python's lock."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [pool.submit(copy_context().run, self._at, live) for live in asked]
            try:
                return [one.result() for one in made]
            finally:  # after an error, or Ctrl-C, none begins
                pool.shutdown(wait=False, cancel_futures=True)

    def _at(self, live_bytes: int, effort: float = 1.0) -> Tried[T]:
        if (live_bytes, effort) not in self._tried:
            answer, plan = self._make(live_bytes, effort)
            self._tried[live_bytes, effort] = Tried(answer, self._placed(plan))
        return self._tried[live_bytes, effort]


def least_of(make: Callable[[int], R], asked: int = 1) -> tuple[int, R, str]:
    """The fewest live bytes from `asked` on that `make` does not refuse, what it gives, and why for no fewer.

    A graph whose surroundings depend on its plan may refuse a floor that it named, and name another. Raises the last of
    MOST_FLOORS refusals.
    """
    cause = "the policy has no smaller plan"
    for _ in range(MOST_FLOORS):
        try:
            return asked, make(asked), cause
        except InfeasibleBudget as error:
            asked, cause = error.floor_bytes, error.cause
    return asked, make(asked), cause


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
