"""Large blocks first, by search; small ones fill the rest by first fit.

The large blocks of a training step are the same few shapes over and over. Their sizes are often multiples of one
another. They pack without loss, except for small blocks between them that shift them off that grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.infeasible_core import subproblem
from overspill.placement.packing.keys import KEYS, order_by
from overspill.placement.packing.problem import Problem

from .exact import Decider, SearchRun
from .greedy import place
from .skyline import solid

SHARES = (0.001, 0.0003, 0.0001)
"""A block is large from this share of the lower bound on, if the exact search packs them."""
EFFORT = 4 * 10**6
"""Most nodes of the exact search, times the large blocks, per share: up to some tenths of a second."""
ATTEMPTS = 40
"""Most attempts per share."""
PREORDERS = ("WAT", "SWT", "AWT", "TSW")
"""Keys of the preorders; size (S) and area (A) place smaller blocks on the grid of the larger."""
RESTARTED = ("WAT", "SWT", "TSW")
"""The preorders that noise is added to."""
NOISES = (0.02, 0.1, 0.3)
"""Standard deviations of the logarithm of the noise on keys."""
FILL_KEYS = ("load", "size", "area")
"""Keys by which the small blocks are placed."""

Pack = Callable[[Problem], Iterator[Integers]]


def layouts(problem: Problem, pack: Pack, shares: Sequence[float] = SHARES) -> Iterator[Integers]:
    """Yield the offsets of all blocks, for each layout of the large ones by `pack` and each key of the small ones.

    A large block has at least one of `shares` of the lower bound, which are tried one after the other. Blocks that are
    always live are at the bottom. It yields nothing if blocks are pinned, have gaps, or differ in alignment.
    """
    if problem.gap_start.size or (problem.pinned != ANYWHERE).any() or np.unique(problem.alignment).size != 1:
        return
    filled = solid(problem)
    # Blocks that are always live go to the bottom.
    permanent = filled.end - filled.start == filled.sections
    ends = np.cumsum(filled.nbytes * permanent)
    bottom = np.where(permanent, ends - filled.nbytes, ANYWHERE)
    for share in shares:
        large = np.flatnonzero(~permanent & (filled.nbytes >= share * filled.lower_bound_bytes))
        if not 0 < len(large) < len(filled) - permanent.sum():
            continue
        # With the large blocks pinned, first fit places the small ones.
        for offsets in pack(subproblem(filled, large.tolist())):
            pinned = bottom.copy()
            pinned[large] = ends[-1] + offsets
            for key in FILL_KEYS:
                yield place(replace(filled, pinned=pinned), order_by(KEYS[key](filled).astype(np.float64)), "first")


def tight(large: Problem, deadline: float, seed: int) -> Iterator[Integers]:
    """Yield layouts within the lower bound, which leave small blocks the most space.

    They come from short attempts of the exact search until `deadline` (of time.perf_counter). With sizes that divide
    one another it needs next to no backtracking, or has no luck for long.
    """
    decider = Decider(large, deadline, seed=seed)
    for attempt in islice(_attempts(len(large), np.random.default_rng(seed)), ATTEMPTS):
        decision = decider.attempt(large.lower_bound_bytes, attempt)
        if decision.offsets is not None:
            yield decision.offsets
        if decision.fits is False or decider.nodes * len(large) >= EFFORT or decider.late:
            return


def _attempts(blocks: int, draw: np.random.Generator) -> Iterator[SearchRun]:
    yield from (SearchRun(keys, np.ones((blocks, 3)), True, 2 * blocks) for keys in PREORDERS)
    for noise in cycle(NOISES):
        for keys in RESTARTED:
            yield SearchRun(keys, np.exp(noise * draw.standard_normal((blocks, 3))), True, 5 * blocks // 4)
