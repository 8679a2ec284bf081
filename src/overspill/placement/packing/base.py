"""What an offline solver is: from a trace to a layout, with a proven bound on what any layout needs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError

from .pieces import refuse_clashing_pins
from .problem import Integers, Problem


@dataclass(frozen=True)
class Limits:
    """What ends a search: a layout within `capacity_bytes` (None: within the lower bound), or `time_limit_seconds`.

    `seed` is for what is drawn at random; the same seed gives the same search.
    """

    capacity_bytes: int | None = None
    time_limit_seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Packing:
    """What a solver finds for one problem: `offsets[i]` for its block i (None: it found no layout).

    No layout has a smaller peak than `bound_bytes`. `infeasible_core` holds blocks of the problem that cannot lie together within
    the capacity that was asked for, where that was proven.
    """

    offsets: Integers | None
    bound_bytes: int
    infeasible_core: tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A layout of a trace (None: none was found), the best proven bound in bytes, and the solver's wall-clock seconds.

    `infeasible_core` holds positions in the trace of blocks that were proven not to fit together within the capacity.
    """

    layout: Layout | None
    bound_bytes: int
    seconds: float
    infeasible_core: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How far the peak is above the proven bound, as a share of the bound; infinite without a layout."""
        if self.layout is None:
            return float("inf")
        return self.layout.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0

    @property
    def optimal(self) -> bool:
        """Whether no layout can have a smaller peak."""
        return self.layout is not None and self.layout.peak_bytes <= self.bound_bytes


class Solver(ABC):
    """An offline solver. Subclasses solve one space in `_pack`; `solve` checks what they find before it is used."""

    name: str
    summary: str
    source: str
    handles_pins: ClassVar[bool] = True

    @abstractmethod
    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        """Offsets for the blocks of `problem`, which are valid, and a proven bound; all in units of the problem."""

    def pack(self, problem: Problem, limits: Limits) -> Packing:
        """What the solver finds for `problem`: nothing depends on the unit, so a layout scales with the sizes."""
        unit = problem.unit_bytes
        capacity = None if limits.capacity_bytes is None else limits.capacity_bytes // unit
        found = self._pack(problem.in_units(), replace(limits, capacity_bytes=capacity))
        offsets = None if found.offsets is None else found.offsets * unit
        return Packing(offsets, found.bound_bytes * unit, found.infeasible_core)

    def solve(self, trace: Trace, limits: Limits | None = None) -> Solution:
        """A validated layout of `trace`; each of its spaces is packed by itself, and may take the whole capacity.

        Raises RequestError where a block cannot be placed, two pins clash, or the solver does not know pins, and InvalidLayout
        should the solver be wrong.
        """
        limits = limits or Limits()
        began = time.perf_counter()
        offsets = [0] * len(trace.blocks)
        for i, block in enumerate(trace.blocks):
            offsets[i] = block.pinned or 0  # a block of no bytes or no time lies where it may
        bound, found = 0, True
        core: list[int] = []
        for space in trace.spaces:
            problem = Problem.of(trace, space)
            self._refuse(problem)
            packing = self.pack(problem, limits)
            bound += max(packing.bound_bytes, problem.lower_bound_bytes)
            core += [int(problem.index[b]) for b in packing.infeasible_core]
            if packing.offsets is None:
                found = False
                continue
            for position, offset in zip(problem.index.tolist(), packing.offsets.tolist(), strict=True):
                offsets[position] = offset
        seconds = time.perf_counter() - began
        layout = None
        if found:
            peak = sum(
                max(o + b.nbytes for o, b in zip(offsets, trace.blocks, strict=True) if b.space == space)
                for space in trace.spaces
            )
            layout = Layout(self.name, tuple(offsets), peak, trace.lower_bound_bytes)
            layout.validate(trace)
        return Solution(layout, bound, seconds, tuple(core))

    def _refuse(self, problem: Problem) -> None:
        refuse_clashing_pins(problem)
        if not self.handles_pins and (problem.pinned >= 0).any():
            raise RequestError(f"the solver {self.name!r} does not know pinned blocks; 'portfolio' does")
