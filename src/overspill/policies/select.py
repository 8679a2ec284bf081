"""The greedy choice of what to take off the device, cheapest per byte-second relieved first.

Twin of native/planning/select.hpp, which gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .program import Gap, Positions

BYTE_COST_SECONDS = 1e-15
"""Breaks ties between free moves towards fewer bytes."""
TICKS_PER_SECOND = 1e12
MOST_TICKS = 1e18
"""Times relieved are counted in whole ticks, so that sums of them are exact; in fewer where all steps would have more."""
LEAST_TICKS = 1000
"""A step of no time still counts as a place where the budget is exceeded."""


@dataclass(frozen=True)
class Candidate:
    """A way to have `nbytes` less on the device during `spans`, at most two half-open stretches of steps.

    It costs `cost_seconds` of compute, and seconds on the links each way. Either a `part` of the trip of a tensor in
    `gap`, or algorithm number `algorithm` of the op at step `position` in place of the one before.
    """

    spans: tuple[tuple[int, int], ...]
    nbytes: int
    cost_seconds: float
    offload_seconds: float = 0.0
    prefetch_seconds: float = 0.0
    gap: Gap | None = None
    part: str = ""
    position: int = 0
    algorithm: int = 0


class Choices:
    """Candidates for one program, and the greedy choice among them, which may be made several times."""

    def __init__(self, candidates: Sequence[Candidate], seconds: NDArray[np.float64], end_of_forward: int) -> None:
        """`seconds` are those of the program's steps; forward ends before step `end_of_forward`."""
        self.candidates = candidates
        longest = len(seconds) * seconds.max(initial=0.0)
        per_second = MOST_TICKS / longest if longest * TICKS_PER_SECOND > MOST_TICKS else TICKS_PER_SECOND
        self.ticks = np.rint(seconds * per_second).astype(np.int64) + LEAST_TICKS
        self.room_out = sum(seconds[:end_of_forward].tolist())
        self.room_back = sum(seconds[end_of_forward:].tolist())
        spans = [(*c.spans, *([(0, 0)] * (2 - len(c.spans)))) for c in candidates]
        bounds = np.array(spans, dtype=np.int64).reshape(-1, 2, 2)
        self.start, self.end = bounds[:, :, 0], bounds[:, :, 1]
        self.nbytes = np.array([c.nbytes for c in candidates], dtype=np.int64)
        self.tensor = np.array([-1 if c.gap is None else c.gap.tensor for c in candidates], dtype=np.int64)
        self.cost = np.array([c.cost_seconds for c in candidates]) + BYTE_COST_SECONDS * self.nbytes
        self.out = np.array([c.offload_seconds for c in candidates])
        self.back = np.array([c.prefetch_seconds for c in candidates])

    def select(
        self, live: Positions, budget_bytes: int, first: Iterable[int] = (), dearer: NDArray[np.float64] | None = None
    ) -> list[int]:
        """The numbers of the candidates taken, those numbered `first` before all others; what they leave may stay above the budget.

        A link hides as many transfer seconds as there are compute seconds beside it: offloads in forward, prefetches
        in backward. What goes beyond is exposed and counts in full. `dearer` are seconds that candidates cost more.
        """
        choice = _Choice(self, live, budget_bytes, dearer)
        for index in first:
            choice.take(index)
        while (index := choice.best()) >= 0:
            choice.take(index)
        choice.prune()
        return choice.taken


class _Choice:
    def __init__(self, among: Choices, live: Positions, budget_bytes: int, dearer: NDArray[np.float64] | None) -> None:
        self.among = among
        self.live = live.copy()
        self.budget_bytes = budget_bytes
        self.cost = among.cost if dearer is None else among.cost + dearer
        self.out = among.out.copy()
        self.open = np.ones(len(among.candidates), dtype=bool)
        self.room_out, self.room_back = among.room_out, among.room_back
        self.taken: list[int] = []

    def best(self) -> int:
        """The open candidate with the lowest cost per byte-second relieved, or -1 when all fits or none helps."""
        over = self.live > self.budget_bytes
        if not over.any() or not self.open.any():
            return -1
        relieved = np.concatenate([[0], np.cumsum(np.where(over, self.among.ticks, 0))])
        times = relieved[self.among.end] - relieved[self.among.start]
        area = self.among.nbytes.astype(np.float64) * (times[:, 0] + times[:, 1])
        useful = self.open & (area > 0)
        if not useful.any():
            return -1
        exposed = np.maximum(self.out - max(0.0, self.room_out), 0.0)
        exposed += np.maximum(self.among.back - max(0.0, self.room_back), 0.0)
        score = np.where(useful, (self.cost + exposed) / np.where(useful, area, 1.0), np.inf)
        return int(np.argmin(score))

    def take(self, index: int) -> None:
        """Take a candidate: its bytes are gone where it relieves; one copy in the store serves every gap of a tensor."""
        among = self.among
        for start, end in among.candidates[index].spans:
            self.live[start:end] -= among.nbytes[index]
        self.open[index] = False
        self.room_out -= float(self.out[index])
        self.room_back -= float(among.back[index])
        if among.tensor[index] >= 0:
            self.out[among.tensor == among.tensor[index]] = 0.0
        self.taken.append(index)

    def prune(self) -> None:
        """Give back, dearest first, what later choices made superfluous."""
        among = self.among
        for index in sorted(self.taken, key=lambda i: self.cost[i] + among.back[i], reverse=True):
            spans = among.candidates[index].spans
            if all((self.live[a:b] + among.nbytes[index]).max(initial=0) <= self.budget_bytes for a, b in spans):
                for start, end in spans:
                    self.live[start:end] += among.nbytes[index]
                self.taken.remove(index)
