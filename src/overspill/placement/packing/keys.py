"""Sort keys of heuristics: one number per block, the larger the sooner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .columns import Integers
from .problem import Problem

Floats = NDArray[np.float64]


def maximal_sections(problem: Problem) -> tuple[Integers, Integers]:
    """Return starts and ends of all blocks, counted in maximal sections only.

    Those are sections whose live blocks are not all live in another. Two blocks share such a section exactly when they
    are ever live together, with gaps taken as live.
    """
    starts, ends = np.zeros(problem.sections, dtype=bool), np.zeros(problem.sections, dtype=bool)
    starts[problem.start] = True
    ends[problem.end - 1] = True
    candidates = np.flatnonzero(ends)
    started = np.cumsum(starts)[candidates]
    kept = np.zeros(problem.sections + 1, dtype=np.int64)
    kept[candidates[np.diff(started, prepend=0) > 0] + 1] = 1
    number = np.cumsum(kept)
    return number[problem.start], number[problem.end]


def highest_load(problem: Problem) -> Integers:
    """Return the largest load in bytes during each block's life.

    It uses range maxima of doubling width, so the memory is linear.
    """
    load, length = problem.load, problem.end - problem.start
    highest = np.zeros(len(problem), dtype=np.int64)
    width = 1
    while width <= length.max(initial=0):
        here = (width <= length) & (length < 2 * width)
        highest[here] = np.maximum(load[problem.start[here]], load[problem.end[here] - width])
        load = np.maximum(load[:-width], load[width:]) if load.size > width else load
        width *= 2
    return highest


def conflicts(problem: Problem) -> Integers:
    """Return with how many other blocks each is live together, with gaps taken as live."""
    begun = np.searchsorted(np.sort(problem.start), problem.end, side="left")
    over = np.searchsorted(np.sort(problem.end), problem.start, side="right")
    return begun - over - 1


def _sections(problem: Problem) -> Integers:
    start, end = maximal_sections(problem)
    return end - start


KEYS: dict[str, Callable[[Problem], Integers | Floats]] = {
    "size": lambda problem: problem.nbytes,
    "lifetime": lambda problem: problem.lifetime,
    "area": lambda problem: problem.nbytes * problem.lifetime.astype(np.float64),
    "sections": _sections,
    "load": highest_load,
    "conflict": conflicts,
    "start": lambda problem: -problem.start,
}
"""The keys by name.

They are bytes; lifetime; bytes x lifetime; lifetime in maximal sections; the largest load in the lifetime; the number
of blocks live with it; an early start.
"""


def order_by(key: Floats) -> Integers:
    """Return blocks by descending key, ties by index."""
    return np.argsort(-key, kind="stable")
