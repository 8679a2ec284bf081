"""The best layout of a search so far, and when the search must end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .base import Limits, Packing, SolverFailed
from .columns import Integers
from .problem import Problem

SHORT_SECONDS, LONG_SECONDS = 0.5, 3.0
"""CPU seconds that a search goes on without its least gain: if less than that is left to gain, and otherwise.

CPU time, so that other load on the machine cuts no search short.
"""


class Incumbent:
    """The best offsets and bound so far, and whether to stop, in units of `problem`.

    It is `done` with a peak within `target`, or at the deadline. If `limits.least_gain` is set, it is also done once
    that share of the target was not gained in the last half of the time, nor for some seconds.
    """

    def __init__(self, problem: Problem, limits: Limits, bound_bytes: int, target: int | None = None) -> None:
        """Set the peak in bytes to reach; None: that of the bound, also when a better one is proven."""
        self.problem, self.limits = problem, limits
        self.bound_bytes = bound_bytes
        self.minimises = target is None
        self.target = bound_bytes if target is None else target
        self.deadline = time.perf_counter() + limits.time_limit_seconds
        self.offsets: Integers | None = None
        self.peak = 0
        self.stopped = ""
        self._began = time.process_time()
        self._found: list[tuple[float, int]] = []  # the CPU time of each better peak

    def offer(self, offsets: Integers | None) -> None:
        """Keep `offsets` if their peak is lower."""
        if offsets is None:
            return
        peak = self.problem.peak_bytes(offsets)
        if self.offsets is None or peak < self.peak:
            self.offsets, self.peak = offsets, peak
            self._found.append((time.process_time(), peak))

    def offer_all(self, layouts: Iterable[Integers]) -> None:
        """Offer layouts one by one until done."""
        for offsets in layouts:
            self.offer(offsets)
            if self.done:
                return

    def prove(self, bound_bytes: int) -> None:
        """Keep the bound if it is better."""
        self.bound_bytes = max(self.bound_bytes, bound_bytes)
        if self.minimises:
            self.target = max(self.target, bound_bytes)

    @property
    def done(self) -> bool:
        """Whether the search has reached its target, or is out of time."""
        if self.offsets is None:
            return False
        now = time.perf_counter()
        return self.peak <= self.target or now > self.deadline or self._stale()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Turn interrupts into a note inside the block, if a layout exists.

        They are Ctrl-C, a failure of a solver, and memory that runs out. Without a layout they are raised.
        """
        try:
            yield
        except (KeyboardInterrupt, MemoryError, SolverFailed) as error:
            if self.offsets is None:
                raise
            if isinstance(error, SolverFailed):
                self.stopped = str(error)
            else:
                self.stopped = "interrupted" if isinstance(error, KeyboardInterrupt) else "memory ran out"

    @property
    def packing(self) -> Packing:
        """The result so far."""
        return Packing(self.offsets, self.bound_bytes, stopped=self.stopped)

    def _stale(self) -> bool:
        least = self.limits.least_gain * self.target
        if not least:
            return False
        patience = SHORT_SECONDS if self.peak - self.target <= least else LONG_SECONDS
        now = time.process_time()
        then = now - max(patience, (now - self._began) / 2)
        before = [peak for at, peak in self._found if at <= then]
        return bool(before) and before[-1] - self.peak < least
