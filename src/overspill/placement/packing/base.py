"""The solver interface: from a trace to a layout, with a proven bound."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError
from overspill.core.reportable import Reportable

from .columns import Columns, Integers
from .pieces import refuse_clashing_pins
from .problem import Problem


@dataclass(frozen=True)
class Limits:
    """The end of a search: a capacity that is met, or a time limit.

    A solver that can improve its layout uses all its time, unless `least_gain` ends it sooner.
    """

    capacity_bytes: int | None = None
    """The search ends with a layout within these bytes; None: within the lower bound."""
    time_limit_seconds: float = 10.0
    seed: int = 0
    """For random choices; the same seed gives the same search."""
    least_gain: float = 0.0
    """The search ends once it no longer gains this share of the bound."""


LEAST_GAIN = 0.001
"""The `least_gain` of a search without a given time limit."""


class SolverFailed(RequestError):
    """A third-party solver failed."""


@dataclass(frozen=True, eq=False)
class Packing:
    """A solver's result for one problem."""

    offsets: Integers | None
    """The address of each block of the problem, `[blocks]`; None: it found no layout."""
    bound_bytes: int
    """No layout has a smaller peak."""
    infeasible_core: tuple[int, ...] = ()
    """Blocks of the problem that were proven not to fit together within the given capacity."""
    stopped: str = ""
    """What ended the search, if nothing in the limits did."""


@dataclass(frozen=True, repr=False)
class Solution(Reportable):
    """A layout of a trace, the best proven bound, and the solver's wall-clock seconds."""

    layout: Layout | None
    """None if none was found."""
    bound_bytes: int
    seconds: float
    infeasible_core: tuple[int, ...] = ()
    """Positions in the trace of blocks that were proven not to fit together within the capacity."""
    stopped: str = ""
    """What ended the search, if nothing in the limits did: an interrupt, or a failure."""
    trace: Trace | None = None
    """The blocks, if a Trace was packed."""

    @property
    def gap(self) -> float:
        """Distance of the peak above the proven bound, as a share of it; infinite without a layout."""
        if self.layout is None:
            return float("inf")
        return self.layout.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0

    @property
    def optimal(self) -> bool:
        """Whether no layout can have a smaller peak."""
        return self.layout is not None and self.layout.peak_bytes <= self.bound_bytes


class Solver(ABC):
    """An offline solver.

    Subclasses solve one space in `_pack`; `solve` checks their result before it is used.
    """

    name: str
    summary: str = ""
    source: str = ""
    handles_pins: ClassVar[bool] = True

    @abstractmethod
    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        """Return offsets for the blocks of `problem`, which is valid, and a proven bound, in its units."""

    def pack(self, problem: Problem, limits: Limits) -> Packing:
        """Return the solver's result for `problem`, computed in its largest unit.

        Nothing depends on the unit, so a layout scales with the sizes.
        """
        unit = problem.unit_bytes
        capacity = None if limits.capacity_bytes is None else limits.capacity_bytes // unit
        found = self._pack(problem.in_units(), replace(limits, capacity_bytes=capacity))
        offsets = None if found.offsets is None else found.offsets * unit
        return replace(found, offsets=offsets, bound_bytes=found.bound_bytes * unit)

    def solve(self, blocks: Trace | Columns, limits: Limits | None = None) -> Solution:
        """Return a checked layout of `blocks`; each memory space is packed separately, and may take the whole capacity.

        Without `limits` a search ends when it gains little. Raises RequestError if a block cannot be placed, two pins
        clash, or the solver does not support pins, and InvalidLayoutError if the solver is wrong.
        """
        limits = limits or Limits(least_gain=LEAST_GAIN)
        began = time.perf_counter()
        columns = Columns.of(blocks) if isinstance(blocks, Trace) else blocks
        offsets = np.maximum(columns.pinned, 0)  # a block of no bytes or no time lies where it may
        lower_bound, bound, found, stopped = 0, 0, True, ""
        core: list[int] = []
        # Pack each space with its share of the time.
        for done, space in enumerate(columns.spaces):
            problem = Problem.of(columns, space)
            self._refuse(problem)
            passed = time.perf_counter() - began if done else 0.0
            left = 0.0 if stopped else max(limits.time_limit_seconds - passed, 0.0)
            share = left / (len(columns.spaces) - done)
            packing = self.pack(problem, replace(limits, time_limit_seconds=share))
            stopped = stopped or packing.stopped
            lower_bound += int(problem.load.max(initial=0))
            bound += max(packing.bound_bytes, problem.lower_bound_bytes)
            core += problem.index[list(packing.infeasible_core)].tolist()
            if packing.offsets is None:
                found = False
                continue
            offsets[problem.index] = packing.offsets
        # Check the layout before anyone uses it.
        seconds = time.perf_counter() - began
        layout = None
        if found:
            peak = sum(columns.peaks(offsets).values())
            layout = Layout(self.name, tuple(offsets.tolist()), peak, lower_bound)
            if isinstance(blocks, Trace):
                layout.validate(blocks)
            else:
                blocks.validate(offsets, peak, lower_bound)
        return Solution(layout, bound, seconds, tuple(core), stopped, blocks if isinstance(blocks, Trace) else None)

    def _refuse(self, problem: Problem) -> None:
        refuse_clashing_pins(problem)
        if not self.handles_pins and (problem.pinned >= 0).any():
            raise RequestError(f"the solver {self.name!r} does not know pinned blocks; 'portfolio' does")
