"""A better lower bound, from the large blocks of short time windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.infeasible_core import subproblem
from overspill.placement.packing.keys import maximal_sections
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem

from .exact import PREORDERS, Decided, Decider, SearchRun

WIDTH = 12
"""Sections in a window; the next one begins half a window later."""
NEAR = 0.97
"""Windows whose load reaches this share of the bound are examined."""
SHARE = 0.01
"""Blocks of at least this share of the bound are examined: fewer blocks are decided sooner."""
NODES = 20_000
"""Most nodes of the exact search per preorder and question."""
EFFORT, MOST_QUESTIONS = 4 * 10**6, 400
"""Most nodes, times the large blocks, of all questions together, and most questions: tenths of a second."""


def window_bound(problem: Problem, bound_bytes: int, deadline: float) -> int:
    """Return a lower bound on the peak of any layout, at least `bound_bytes`, which is a bound itself.

    The blocks of a window of time need no more than all blocks do, and the large ones of them no more than these.
    Blocks that live all through the window take their bytes off the capacity. If large blocks of few sizes nearly fill
    it, the exact search proves quickly that the rest does not fit. Alignments and pins do not count, and a block with
    gaps may come back anywhere. It ends at `deadline` (of time.perf_counter).
    """
    whole = _apart(problem)
    asked = effort = 0
    for window in _windows(whole, bound_bytes):
        through = window.end - window.start == window.sections
        covered = int(window.nbytes[through].sum())
        large = np.flatnonzero(~through & (window.nbytes >= SHARE * bound_bytes))
        if not large.size:
            continue
        # Raise the bound as long as it is proven too small for this window.
        decider = Decider(subproblem(window, large.tolist()), deadline)
        step = decider.model.step_bytes
        while _decide(decider, bound_bytes - covered).fits is False:
            bound_bytes = (bound_bytes - covered) // step * step + step + covered
        asked, effort = asked + 1, effort + decider.nodes * large.size
        if asked >= MOST_QUESTIONS or effort >= EFFORT or decider.late:
            break
    return bound_bytes


def _apart(problem: Problem) -> Problem:
    """Return the pieces of all blocks as separate blocks, in maximal sections; they may be placed anywhere."""
    pieces = Pieces.of(problem)
    count, none = len(pieces.owner), np.zeros(0, dtype=np.int64)
    apart = Problem(
        index=problem.index[pieces.owner],
        start=pieces.start,
        end=pieces.end,
        nbytes=problem.nbytes[pieces.owner],
        alignment=np.ones(count, dtype=np.int64),
        pinned=np.full(count, ANYWHERE),
        lifetime=pieces.end - pieces.start,
        gap_first=np.zeros(count + 1, dtype=np.int64),
        gap_start=none,
        gap_end=none,
    )
    return _within(apart, *maximal_sections(apart))


def _windows(whole: Problem, bound_bytes: int) -> Iterator[Problem]:
    """Yield the blocks of each nearly full window, cut off at its ends."""
    for first in range(0, max(whole.sections - WIDTH // 2, 1), WIDTH // 2):
        last = min(first + WIDTH, whole.sections)
        if whole.load[first:last].max(initial=0) < NEAR * bound_bytes:
            continue
        live = np.flatnonzero((whole.start < last) & (whole.end > first))
        start, end = np.maximum(whole.start[live], first), np.minimum(whole.end[live], last)
        yield _within(subproblem(whole, live.tolist()), start - first, end - first)


def _within(problem: Problem, start: Integers, end: Integers) -> Problem:
    return replace(problem, start=start, end=end, lifetime=end - start)


def _decide(decider: Decider, capacity_bytes: int) -> Decided:
    decision = Decided(None)
    for keys in PREORDERS:
        noise = np.ones((len(decider.problem), 3))
        decision = decider.attempt(capacity_bytes, SearchRun(keys, noise, True, NODES))
        if decision.fits is not None or decider.late:
            break
    return decision
