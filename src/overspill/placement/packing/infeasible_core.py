"""A smallest set of blocks that does not fit a given capacity."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .columns import ANYWHERE, Integers
from .pieces import Pieces
from .problem import Problem

SHARE = 8
"""Each test whether fewer blocks fit may take one part in so many of the time left."""


def infeasible_core(
    problem: Problem, capacity_bytes: int, infeasible: Callable[[Problem, int, float], bool], deadline: float
) -> tuple[int, ...]:
    """Return few blocks of `problem` that alone do not fit the capacity.

    All of its blocks are known not to fit. Without any one of the core, the others fit, or were not proven not to
    before `deadline` (of time.perf_counter). `infeasible(problem, capacity_bytes, deadline)` returns whether that is
    proven.
    """
    if high := _too_high(problem, capacity_bytes):
        return high
    full = _too_full(problem, capacity_bytes)
    if full and problem.plain:
        return tuple(sorted(full))
    # Drop chunks of blocks, smaller and smaller, as long as the rest does not fit.
    kept = full or np.lexsort((problem.end, problem.start)).tolist()
    chunk = len(kept)
    while chunk > 1:
        chunk = (chunk + 1) // 2
        at = 0
        while at < len(kept) and (now := time.perf_counter()) < deadline:
            rest = kept[:at] + kept[at + chunk :]
            if rest and infeasible(subproblem(problem, rest), capacity_bytes, now + (deadline - now) / SHARE):
                kept = rest
            else:
                at += chunk
    return tuple(sorted(kept))


def subproblem(problem: Problem, blocks: list[int]) -> Problem:
    """Return the problem of some blocks, in that order, with the same sections."""
    chosen = np.array(blocks, dtype=np.int64)
    gap_counts = np.diff(problem.gap_first)[chosen]
    gaps = (
        np.concatenate([np.arange(problem.gap_first[block], problem.gap_first[block + 1]) for block in blocks])
        if blocks
        else np.zeros(0, dtype=np.int64)
    )
    return Problem(
        index=problem.index[chosen],
        start=problem.start[chosen],
        end=problem.end[chosen],
        nbytes=problem.nbytes[chosen],
        alignment=problem.alignment[chosen],
        pinned=problem.pinned[chosen],
        lifetime=problem.lifetime[chosen],
        gap_first=np.concatenate([[0], np.cumsum(gap_counts)]),
        gap_start=problem.gap_start[gaps],
        gap_end=problem.gap_end[gaps],
    )


def _too_high(problem: Problem, capacity_bytes: int) -> tuple[int, ...]:
    """Return a block pinned beyond the capacity, if any."""
    top = np.where(problem.pinned == ANYWHERE, 0, problem.pinned) + problem.nbytes
    return tuple(np.flatnonzero(top > capacity_bytes)[:1].tolist())


def _too_full(problem: Problem, capacity_bytes: int) -> list[int]:
    """Return the fewest blocks of the fullest section that exceed the capacity: the largest ones; none if all fit."""
    pieces = Pieces.of(problem)
    section = int(problem.load.argmax())
    live: Integers = np.unique(pieces.owner[(pieces.start <= section) & (section < pieces.end)])
    live = live[np.argsort(-problem.nbytes[live], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(problem.nbytes[live]), capacity_bytes, side="right")) + 1
    return live[:needed].tolist() if needed <= live.size else []
