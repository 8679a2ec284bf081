"""Place a trace with any allocator or solver, and measure fragmentation."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from overspill.core import Trace
from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean
from overspill.plans.plan import Plan
from overspill.policies import IDEAS
from overspill.simulate import trace_of

from .allocators.caching import CachingAllocator
from .allocators.registry import ALLOCATORS, allocator_named
from .events import Events
from .packing import LEAST_GAIN, SOLVERS, Limits, solver_named
from .replay import replay, replay_on

PLACERS = (*ALLOCATORS, *SOLVERS)
"""Names of all that can place a trace: online allocators, then offline solvers."""
SEARCH = Limits(time_limit_seconds=1.0, least_gain=LEAST_GAIN)
"""A solver's default limits."""


@dataclass(frozen=True)
class Placed:
    """The bytes that `placer` takes for a trace."""

    placer: str
    peak_bytes: int
    """Bytes that an allocator holds of the device, or the highest end of a solver's layout."""
    lower_bound_bytes: int
    """The most live bytes of the trace."""
    unusable: float | None
    """Share of free bytes in blocks too small for the trace's largest block, averaged over time.

    It is U_f of Dymem §3.3.1 eq. 1; None for solvers, which keep no free blocks.
    """
    seconds: float
    """Wall-clock seconds."""

    @property
    def fragmentation(self) -> float:
        """The share of the peak that no live byte ever needed."""
        return 1 - self.lower_bound_bytes / self.peak_bytes if self.peak_bytes else 0.0


def check_placer(name: str, *others: str) -> None:
    """Raise RequestError unless `name` is an allocator, a solver, or one of `others`."""
    if name not in PLACERS:
        if name.lower() in IDEAS:
            raise RequestError(f"nothing that places blocks is called {name!r}: {IDEAS[name.lower()]}")
        known = dict.fromkeys((*others, *PLACERS))
        hint = did_you_mean(name, known)
        raise RequestError(f"nothing that places blocks is called {name!r}{hint} There are {', '.join(known)}")


def place(trace: Trace, placer: str, limits: Limits = SEARCH) -> Placed:
    """Place `trace` with the allocator or solver called `placer`.

    A solver stops at `limits`. Raises RequestError for an unknown name, and for a trace that the allocator cannot place
    on a device of any size.
    """
    check_placer(placer)
    bound = trace.lower_bound_bytes
    if placer in SOLVERS:
        solution = solver_named(placer).solve(trace, limits)
        if solution.layout is None:
            raise RequestError(f"the solver {placer!r} found no layout within its time; raise the limit")
        return Placed(placer, solution.layout.peak_bytes, bound, None, solution.seconds)
    # An allocator is replayed twice: for its peak, timed, and for unusable bytes.
    kind = ALLOCATORS[placer]
    step = Events.of(trace, by_references=kind.by_references)
    events, learnt = step.repeated(1 + kind.learns_steps), len(step) * kind.learns_steps
    began = time.perf_counter()
    peak = replay(events, placer).peak_reserved_bytes
    seconds = time.perf_counter() - began
    largest = max((b.nbytes for b in trace.blocks), default=0)
    if learnt:  # as under a running job, which says where its steps end
        ends = range(len(step), len(events) + 1, len(step))
        done = replay_on(allocator_named(placer), events, request_bytes=largest, ends=ends)
        assert done.reserved is not None
        peak = int(done.reserved[learnt:].max(initial=0))
    else:
        done = replay(events, placer, request_bytes=largest)
    if not done.fits:
        raise RequestError(
            f"the allocator {placer!r} cannot place this trace in its address space; take another, as pytorch"
        )
    assert done.unusable is not None
    unusable = float(np.mean(done.unusable[learnt:])) if len(events) else 0.0
    return Placed(placer, peak, bound, unusable, seconds)


def place_plan(plan: Plan, placer: str | None = None) -> Placed:
    """Place the blocks of `plan` with `placer`.

    None: with PyTorch's caching allocator, which serves blocks without planned addresses.
    """
    return place(trace_of(plan.graph, plan.schedule, plan.groups), placer or CachingAllocator.name)
