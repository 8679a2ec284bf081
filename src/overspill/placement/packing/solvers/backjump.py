"""Ever smaller layouts from many short runs of the backjumping search, which learn where it is tight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from overspill.placement.packing import native as native_code
from overspill.placement.packing.keys import KEYS, Floats
from overspill.placement.packing.problem import Integers, Problem

from .backjump_twin import TwinBackjumpSearch
from .exact_model import ExactModel

PREORDERS = (("sections", "load", "area"), ("sections", "area", "load"))
"""Keys of the preorders, each with those that decide between equal ones."""
NOISES = (0.0, 0.01)
"""Standard deviations of the logarithm of the noise on keys."""
SHARES = (0.95, 0.8, 0.6)
"""What an attempt leaves of the way from the target to the best peak."""
PATIENCE, LEAST_PATIENCE = 0.5, 10
"""How many nodes, times the blocks, an attempt may take without more blocks placed than ever before; and at least."""
EFFORT, ATTEMPTS = 7 * 10**8, 4000
"""How many nodes, times the blocks, all attempts may take: a second or so; and how many attempts there may be."""
FORGET = 0.8
"""What is left of an attempt's blames after the next one."""


class Search(Protocol):
    """The native search or its twin, which explains the arguments."""

    def attempt(
        self, capacity: int, rank: Integers, patience: int, seconds: float
    ) -> tuple[bool, int, list[int], list[int]]: ...


def shrinking(
    problem: Problem,
    target_bytes: int,
    peak_bytes: int,
    deadline: float,
    *,
    seed: int = 0,
    attempts: int = ATTEMPTS,
    native: bool | None = None,
) -> Iterator[Integers]:
    """Offsets with a peak below `peak_bytes`, then below that, and so on; once at the target, others as low.

    The blocks of `problem` have no gaps, no pins and one alignment, of which their sizes are multiples. An attempt puts
    them in a preorder by keys with noise. Those that had no room in attempts before count for up to twice as much
    (squeaky wheel optimization: Joslin and Clements, 1999), and the keys of the last success are tried again with other
    noise. It ends after `attempts`, after `EFFORT`, or at `deadline` (of time.perf_counter).
    """
    model = ExactModel.of(problem)
    make = native_code.backjump_search if native_code.chosen(native) else TwinBackjumpSearch
    search: Search = make(model.sections, model.pieces.start, model.pieces.end, model.size, model.below)
    preorders = [[KEYS[name](problem).astype(np.float64) for name in names] for names in PREORDERS]
    draw = np.random.default_rng(seed)
    blame: Floats = np.zeros(len(problem))
    effort = 0
    for number in range(attempts):
        seconds = deadline - time.perf_counter()
        if effort >= EFFORT or seconds <= 0:
            return
        turn, chosen = divmod(number, len(preorders))
        noise = np.exp(NOISES[turn % len(NOISES)] * draw.standard_normal(len(problem)))
        weight = noise * (1 + blame / max(blame.max(initial=0), 1))
        keys = [key * weight for key in preorders[chosen]]
        capacity = target_bytes + int(SHARES[number % len(SHARES)] * max(peak_bytes - 1 - target_bytes, 0))
        patience = max(LEAST_PATIENCE, int(PATIENCE * len(problem)))
        found, nodes, offsets, blames = search.attempt(capacity // model.unit, _rank(keys), patience, seconds)
        effort += nodes * len(problem)
        blame = FORGET * blame + np.array(blames)
        if found:
            layout = np.array(offsets, dtype=np.int64) * model.unit
            peak_bytes = problem.peak_bytes(layout)
            preorders[len(PREORDERS) :] = [keys]
            yield layout


def _rank(keys: list[Floats]) -> Integers:
    """The place of each block in the order by descending keys, ties by index."""
    order = np.lexsort([-key for key in reversed(keys)])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank
