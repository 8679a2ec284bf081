"""Planned addresses for training steps: record one, solve, replay."""

from __future__ import annotations

import warnings
from dataclasses import replace
from enum import Enum
from typing import ClassVar

from overspill.core import Layout, Trace
from overspill.core.errors import OutOfMemory, RequestError
from overspill.placement.packing.base import Solver

from .allocator import LiveAllocator
from .need import PLANNED
from .steps import LiveSteps, PoolReport

RECORDED_STEPS = 2
"""The second step shows when blocks left by the first are freed."""
MOST_DRAINING = 4
"""Most steps served by the pool while the old arena has live blocks; then the new one is made alongside it."""


class PoolPhase(Enum):
    """The allocator's present use of steps."""

    WARM_UP = "warm-up"
    RECORDING = "recording"
    DRAINING = "draining"
    PLANNED = "planned"


class PlannedSteps(LiveSteps):
    """Drives an allocator from recording a step to replaying solved addresses.

    The loop only calls `begin_step`. The first `warm_up_steps` are not recorded: they make what lives for good, such as
    the state of an optimizer. When a step's requests differ from the plan, steps are recorded and solved again
    (profile-guided placement, section 4.3); meanwhile the old plan places what it can. Its arena is freed before the
    new one is made: for a step the pool serves all. A program that always changes would be solved all the time, so each
    time twice as many steps must have passed since the last. Where the allocator's limit leaves no room for an arena,
    or an arena leaves less room to other blocks, so that more lies elsewhere than before, the pool goes on serving all.
    """

    name: ClassVar = PLANNED

    def __init__(self, allocator: LiveAllocator, solver: Solver, *, warm_up_steps: int = 1) -> None:
        if warm_up_steps < 0:
            raise RequestError(f"there cannot be {warm_up_steps} steps of warm-up")
        super().__init__(allocator)
        self.solver = solver
        self.trace: Trace | None = None
        self.layout: Layout | None = None
        self.plans = 0
        self._spilled_bytes = 0
        self._phase = PoolPhase.WARM_UP
        self._steps_left = warm_up_steps

    @property
    def phase(self) -> PoolPhase:
        """The phase of the current step."""
        return self._phase

    def begin_step(self) -> None:
        """Begin a step, after moving to the next phase if it is due.

        Raises RequestError where PyTorch has since been set to do what does not work with the allocator.
        """
        if self._phase is PoolPhase.DRAINING and not self.allocator.drains:
            self._steps_left = 0
        # The phase is over: go on to the next.
        if self._steps_left == 0:
            if self._phase is PoolPhase.WARM_UP:
                self._record()
            elif self._phase is PoolPhase.RECORDING:
                self._solve()
            elif self._phase is PoolPhase.DRAINING:
                self._replay()
            elif self.allocator.statistics().peak_spilled_bytes > self._spilled_bytes:
                self._give_up()
            elif self.allocator.statistics().needs_reoptimisation:
                self._record()
        self._steps_left = max(self._steps_left - 1, 0)
        super().begin_step()

    def report(self) -> PoolReport:
        """The pool's statistics so far; those of planned addresses over all steps."""
        now = self.allocator.statistics()
        share = now.planned / now.requests if now.requests else None
        return replace(super().report(), reoptimisations=max(self.plans - 1, 0), planned_share=share)

    def _record(self) -> None:
        self.allocator.record()
        self._phase, self._steps_left = PoolPhase.RECORDING, RECORDED_STEPS

    def _solve(self) -> None:
        trace = self.allocator.recorded()
        solution = self.solver.solve(trace)
        if solution.layout is None:
            raise RequestError(f"the solver {self.solver.name!r} found no layout of a step; 'portfolio' always does")
        self.trace, self.layout = trace, solution.layout
        self.allocator.forget_plan()
        if self.allocator.drains:
            self._phase, self._steps_left = PoolPhase.DRAINING, MOST_DRAINING
        else:
            self._replay()

    def _replay(self) -> None:
        assert self.trace is not None
        assert self.layout is not None
        self._phase, self._steps_left = PoolPhase.PLANNED, 2**self.plans
        self.plans += 1
        self._spilled_bytes = self.allocator.statistics().peak_spilled_bytes
        try:
            self.allocator.replay(self.trace, self.layout)
        except OutOfMemory as error:
            warnings.warn(f"steps keep the addresses that the pool gives, within the same limit: {error}", stacklevel=4)

    def _give_up(self) -> None:
        """Drop an arena that leaves too little room to other blocks."""
        self.allocator.forget_plan()
        self._spilled_bytes = self.allocator.statistics().peak_spilled_bytes
        warnings.warn(
            "steps keep the addresses that the pool gives: beside an arena it has too little room", stacklevel=4
        )
