"""Overspill's default solver: many quick heuristics, the best one wins; then large blocks first, then restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes, rounded
from overspill.placement.packing.keys import KEYS, Floats, order_by
from overspill.placement.packing.problem import ANYWHERE, Integers, Problem

from .exact import Decider
from .greedy import Fit, place
from .large_first import layouts, tight
from .skyline import packer_of, solid
from .window_bound import window_bound

SKYLINE_KEYS = (
    ("load", "sections"),
    ("area", "size"),
    ("sections", "size"),
    ("size", "sections"),
    ("lifetime", "size"),
)
"""The keys of the skylines, each with the key that decides between equal ones."""
RESTARTED_BLOCKS, FEWEST_RESTARTS = 100_000, 4
"""How many blocks are placed in restarts by default, all added up: some tenths of a second; and the fewest restarts."""
BLOCKS_OF_A_RESTART = 100
"""A restart takes as long as the placing of so many blocks, beside its own."""
EXACT_BLOCKS = 1000
"""Up to so many blocks, or large blocks, the exact search takes over where the heuristics end above the bound."""
SEARCHED_BLOCKS = 10_000
"""Up to so many blocks their large ones are asked for a better bound."""
GREEDY_KEYS = ("size", "area", "lifetime", "load", "conflict")

Heuristic = Callable[[Floats, int | None], Integers | None]


@dataclass
class Rule:
    """A heuristic that packs the blocks by a key, and the state of its local search over keys.

    `attempt(key, limit)` gives offsets, or nothing once a block ends above the limit. `offsets` is the last layout that
    the search has accepted, made with the key times `weights`.
    """

    problem: Problem
    key: Floats
    attempt: Heuristic
    weights: Floats = field(init=False)
    offsets: Integers = field(init=False)

    def start(self) -> Integers:
        """Pack by the key as it is."""
        offsets = self.attempt(self.key, None)
        assert offsets is not None
        self.weights, self.offsets = np.ones(len(self.key)), offsets
        return offsets

    def restart(self, target: int, temperature: float, random: np.random.Generator) -> Integers | None:
        """Perturb the weights and pack again; None, and no change, where the peak is too high to go on from."""
        peak = self.problem.peak_bytes(self.offsets)
        weights = self.weights.copy()
        high = np.flatnonzero(self.offsets + self.problem.nbytes > target)
        weights[high[random.random(high.size) < 1 / 3]] *= 1 + random.random() / 2
        changed = random.integers(len(weights), size=random.integers(1, 2 + len(weights) // 20))
        weights[changed] *= np.exp(random.normal(scale=0.4, size=changed.size))
        limit = peak + int(temperature * peak * random.exponential()) + 1
        offsets = self.attempt(self.key * weights, limit)
        if offsets is not None:
            self.weights, self.offsets = weights, offsets
        return offsets


class Incumbent:
    """The best layout so far, and whether it is time to stop."""

    def __init__(self, problem: Problem, target: int, seconds: float) -> None:
        self._problem, self.target = problem, target
        self.deadline = time.perf_counter() + seconds
        self.offsets: Integers | None = None
        self.peak = 0

    def offer(self, offsets: Integers | None) -> None:
        if offsets is None:
            return
        peak = self._problem.peak_bytes(offsets)
        if self.offsets is None or peak < self.peak:
            self.offsets, self.peak = offsets, peak

    def offer_all(self, layouts: Iterable[Integers]) -> None:
        """Offer one after the other, until done."""
        for offsets in layouts:
            self.offer(offsets)
            if self.done:
                return

    @property
    def done(self) -> bool:
        return self.offsets is not None and (self.peak <= self.target or time.perf_counter() > self.deadline)


class Portfolio(Solver):
    """The guarded skyline by several keys, greedy placement where there are pins or gaps; then restarts.

    It stops as soon as a peak is within the capacity asked for, by default the lower bound. Where the first run by each
    key ends above it, large blocks are packed first, by the exact search if they are at most `exact_blocks`, or as if
    there were no others (not if `exact_blocks` is 0). Where that does not reach it, and there are at most
    `SEARCHED_BLOCKS` blocks, the bound may be raised (see `window_bound`). A restart perturbs the key of one rule: blocks above the target weigh up
    to half as much again, a twentieth of all blocks are changed at random; a layout with a higher peak is accepted less
    and less. `restarts`: how many; by default a few, fewer for more blocks, or, where a capacity is asked for that the
    lower bound allows, as many as the time limit allows. Where these end above the bound and there are at most
    `exact_blocks` blocks, the exact search has the time that is left. But for the time limit the
    search is a function of the problem, the capacity and the seed.
    """

    name = "portfolio"
    summary = "guarded skylines by several keys, large blocks first, restarts, and for few blocks the exact search"
    source = "Overspill's own, on the skyline of Sekiyama et al. (2018), section 3.2"

    def __init__(self, restarts: int | None = None, *, exact_blocks: int = EXACT_BLOCKS) -> None:
        self.restarts, self.exact_blocks = restarts, exact_blocks

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        bound = bound_bytes(problem)
        target = rounded(problem).lower_bound_bytes if limits.capacity_bytes is None else limits.capacity_bytes
        best = Incumbent(problem, target, limits.time_limit_seconds)
        rules: list[Rule] = []
        exact_blocks = self.exact_blocks
        best.offer_all(self._starts(problem, target, rules))
        if exact_blocks and not best.done:
            bound = self._large_first(problem, bound, best, limits.seed)
        if best.done:
            return Packing(best.offsets, bound)
        random = np.random.default_rng(limits.seed)
        restarts = self.restarts
        exact = len(problem) <= exact_blocks
        if restarts is None and (exact or limits.capacity_bytes is None or limits.capacity_bytes < bound):
            restarts = max(FEWEST_RESTARTS, RESTARTED_BLOCKS // (BLOCKS_OF_A_RESTART + len(problem)))
        for k in count() if restarts is None else range(restarts):
            if best.done:
                break
            temperature = 0.002 * np.exp(-5 * (k / restarts if restarts else 1 / 2))
            best.offer(rules[k % len(rules)].restart(best.target, temperature, random))
        if best.done or best.offsets is None or not exact:
            return Packing(best.offsets, bound)
        decider = Decider(problem, best.deadline, seed=limits.seed)
        if limits.capacity_bytes is None or limits.capacity_bytes < bound:
            return Packing(*decider.minimise(best.offsets, bound))
        best.offer(decider.decide(limits.capacity_bytes).offsets)
        return Packing(best.offsets, bound)

    def _starts(self, problem: Problem, target: int, rules: list[Rule]) -> Iterator[Integers]:
        for rule in self._rules(problem, target):
            rules.append(rule)
            yield rule.start()

    def _large_first(self, problem: Problem, bound: int, best: Incumbent, seed: int) -> int:
        """Offer layouts that begin with the large blocks; the bound, which may be better."""
        searched = len(problem) <= SEARCHED_BLOCKS
        restarts = FEWEST_RESTARTS if searched else None
        best.offer_all(layouts(problem, partial(self._pack_large, restarts, best.deadline, seed)))
        if best.done or not searched:
            return bound
        bound = window_bound(problem, bound, best.deadline)
        best.target = max(best.target, bound)
        return bound

    def _pack_large(self, restarts: int | None, deadline: float, seed: int, large: Problem) -> Iterator[Integers]:
        found = False
        if len(large) <= self.exact_blocks:
            for offsets in tight(large, deadline, seed):
                found = True
                yield offsets
        if not found:
            seconds = max(deadline - time.perf_counter(), 0)
            packing = Portfolio(restarts, exact_blocks=0)._pack(large, Limits(None, seconds, seed))
            if packing.offsets is not None:
                yield packing.offsets

    def _rules(self, problem: Problem, target: int) -> Iterator[Rule]:
        if (problem.pinned == ANYWHERE).all():
            filled = solid(problem)
            packer = packer_of(filled)
            for name, tie in SKYLINE_KEYS:
                key, other = KEYS[name](filled).astype(np.float64), KEYS[tie](filled)
                key += other / (2.0 * other.max(initial=0) + 1)  # below one half
                yield Rule(problem, key, lambda key, limit: packer.pack(key, target, limit))
        if not problem.plain:
            fits: tuple[Fit, ...] = ("first", "best")
            for name in GREEDY_KEYS:
                for fit in fits:
                    key = KEYS[name](problem).astype(np.float64)
                    yield Rule(problem, key, partial(self._greedy, problem, fit))

    def _greedy(self, problem: Problem, fit: Fit, key: Floats, limit: int | None) -> Integers | None:
        offsets = place(problem, order_by(key), fit)
        return offsets if limit is None or problem.peak_bytes(offsets) <= limit else None
