"""Planned placement of training steps: one is recorded, its trace is solved, the others get the planned addresses."""

from __future__ import annotations

from enum import Enum

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Solver

from .allocator import LiveAllocator

RECORDED_STEPS = 2
"""The second one tells when the next step frees what a step leaves."""


class Phase(Enum):
    """What the allocator does with the steps now."""

    WARM_UP = "warm-up"
    RECORDING = "recording"
    PLANNED = "planned"


class PlannedSteps:
    """Leads an allocator through a training loop; `begin_step` is all that the loop calls.

    The first `warm_up_steps` are not recorded: they make what lives for good, such as the state of an optimizer. When a
    step asks for something else than planned, steps are recorded and solved anew (profile-guided placement, section
    4.3); meanwhile the old plan places what it can. A program that is different all the time would be solved all the
    time, so each time twice as many steps must have passed since the last.
    """

    def __init__(self, allocator: LiveAllocator, solver: Solver, *, warm_up_steps: int = 1) -> None:
        if warm_up_steps < 0:
            raise RequestError(f"there cannot be {warm_up_steps} steps of warm-up")
        self.allocator = allocator
        self.solver = solver
        self.trace: Trace | None = None
        self.layout: Layout | None = None
        self.plans = 0
        self._phase = Phase.WARM_UP
        self._steps_left = warm_up_steps

    @property
    def phase(self) -> Phase:
        """What is done with the step that runs."""
        return self._phase

    def begin_step(self) -> None:
        """Begin a step, after what has to be done between it and the one before.

        Raises OutOfMemory when there is no memory for the plan, beside what lives on from step to step.
        """
        if self._steps_left == 0:
            if self._phase is Phase.WARM_UP:
                self._record()
            elif self._phase is Phase.RECORDING:
                self._plan()
            elif self.allocator.statistics().needs_reoptimisation:
                self._record()
        self._steps_left = max(self._steps_left - 1, 0)
        self.allocator.begin_step()

    def _record(self) -> None:
        self.allocator.record()
        self._phase, self._steps_left = Phase.RECORDING, RECORDED_STEPS

    def _plan(self) -> None:
        trace = self.allocator.recorded()
        solution = self.solver.solve(trace)
        if solution.layout is None:
            raise RequestError(f"the solver {self.solver.name!r} found no layout of a step; 'portfolio' always does")
        self.allocator.replay(trace, solution.layout)
        self.trace, self.layout = trace, solution.layout
        self._phase, self._steps_left = Phase.PLANNED, 2**self.plans
        self.plans += 1
