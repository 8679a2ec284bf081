"""The default solver: quick heuristics, large blocks first, then restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes, rounded
from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.incumbent import Incumbent
from overspill.placement.packing.keys import KEYS, Floats, order_by
from overspill.placement.packing.problem import Problem

from .boxes import boxed_layouts
from .exact import PAIR_LIMIT, Decider, pairs
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
"""Keys of the skylines, each with its tie-break."""
RESTARTED_BLOCKS, FEWEST_RESTARTS = 100_000, 4
"""Blocks placed in restarts by default, all added up, some tenths of a second; and the fewest restarts."""
BLOCKS_OF_A_RESTART = 100
"""A restart's fixed cost, as a number of blocks placed."""
EXACT_BLOCKS = 1000
"""Most blocks, or large blocks, for the exact search, if the heuristics end above the bound."""
DESCENT_BLOCKS = 5000
"""Most blocks for exact descents with few backtracks; above `EXACT_BLOCKS` a node takes long."""
BOXED_BLOCKS = 5000
"""Most blocks for boxes, whose time is quadratic."""
SEARCHED_BLOCKS = 10_000
"""Most blocks for which the large ones may give a better bound."""
LOCAL = 0.7
"""Share of the restarts that change blocks near one that is too high, not all over."""
MARGINS, LOCAL_SHARES = (0.02, 0.05, 0.1), (0.05, 0.2, 0.5)
"""Window around its life, as a share of all time, and the share of blocks changed in it."""
NODES_OF_A_RESTART = 40
"""Nodes of the exact search that take as long as one restart."""
GREEDY_KEYS = ("size", "area", "lifetime", "load", "conflict")

Heuristic = Callable[[Floats, int | None], Integers | None]


@dataclass
class Rule:
    """A heuristic that packs by a key, with its local search over keys."""

    problem: Problem
    key: Floats
    attempt: Heuristic
    """`attempt(key, limit)` returns offsets, or nothing once a block ends above the limit."""
    weights: Floats = field(init=False)
    offsets: Integers = field(init=False)
    """The last layout that the search has accepted, made with the key times `weights`."""

    def start(self) -> Integers:
        """Pack by the unchanged key."""
        offsets = self.attempt(self.key, None)
        assert offsets is not None
        self.weights, self.offsets = np.ones(len(self.key)), offsets
        return offsets

    def restart(self, target: int, temperature: float, random: np.random.Generator) -> Integers | None:
        """Perturb the weights and pack again.

        Returns None, and changes nothing, if the peak is too high to go on from.
        """
        peak = self.problem.peak_bytes(self.offsets)
        # Raise blocks that are too high, and change some near one of them or anywhere.
        weights = self.weights.copy()
        high = np.flatnonzero(self.offsets + self.problem.nbytes > target)
        weights[high[random.random(high.size) < 1 / 3]] *= 1 + random.random() / 2
        if high.size and random.random() < LOCAL:
            changed = self._near(int(random.choice(high)), random)
        else:
            changed = random.integers(len(weights), size=random.integers(1, 2 + len(weights) // 20))
        weights[changed] *= np.exp(random.normal(scale=0.4, size=changed.size))
        # Accept a slightly higher peak, as in annealing.
        limit = peak + int(temperature * peak * random.exponential()) + 1
        offsets = self.attempt(self.key * weights, limit)
        if offsets is not None:
            self.weights, self.offsets = weights, offsets
        return offsets

    def _near(self, block: int, random: np.random.Generator) -> Integers:
        """Return some of the blocks that live about when `block` does: a window of time to be packed again."""
        problem = self.problem
        margin = max(1, int(problem.sections * random.choice(MARGINS)))
        around = np.flatnonzero(
            (problem.start < problem.end[block] + margin) & (problem.end > problem.start[block] - margin)
        )
        return around[random.random(around.size) < random.choice(LOCAL_SHARES)]


class Portfolio(Solver):
    """Guarded skylines by several keys, greedy placement (for pins and gaps), then restarts and searches.

    It stops as soon as a peak is within the given capacity, by default the lower bound. If the first run by each key
    ends above it, blocks are put in boxes (`BOXED_BLOCKS`). Then large blocks are packed first: by the exact search if
    they are at most `exact_blocks`, otherwise as if they were alone. If that does not reach it, and the blocks are at
    most `SEARCHED_BLOCKS`, the bound may be raised (see `window_bound`). With `exact_blocks` 0, boxes and all that
    follows are left out.

    Then rounds take the time that is left: restarts, boxes put together in another order, and a turn of the exact
    search if it takes the blocks. A restart perturbs the key of one rule. Blocks above the target weigh up to half as
    much again. Some blocks are changed at random, mostly some that live around one that is too high: a neighbourhood in
    time is packed again. A layout with a higher peak is accepted less and less. `restarts` is their number before the
    exact search takes the time that is left; None: in rounds. Apart from its end, the search is a function of the
    problem, the capacity and the seed, so that more time never gives a higher peak.
    """

    name = "portfolio"
    summary = "guarded skylines by several keys, boxes, large blocks first; then restarts in turn with the exact search"
    source = "Overspill's own, on the skyline of Sekiyama et al. (2018), section 3.2"

    def __init__(self, restarts: int | None = None, *, exact_blocks: int = EXACT_BLOCKS) -> None:
        self.restarts, self.exact_blocks = restarts, exact_blocks

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        bound = bound_bytes(problem)
        target = None if limits.capacity_bytes is None else max(limits.capacity_bytes, bound)
        best = Incumbent(problem, limits, bound, target)
        if target is None:
            best.target = rounded(problem).lower_bound_bytes
        with best.kept():
            self._search(best)
        return best.packing

    def _search(self, best: Incumbent) -> None:
        problem = best.problem
        # Quick heuristics, then boxes and large blocks first.
        rules: list[Rule] = []
        best.offer_all(self._starts(problem, best.target, rules))
        if self.exact_blocks and not best.done:
            if len(problem) <= BOXED_BLOCKS:
                best.offer_all(boxed_layouts(problem))
            if not best.done:
                self._large_first(best)
        if best.done:
            return
        # Restarts in turn with boxes and the exact search, until done.
        random = np.random.default_rng(best.limits.seed)
        turns = self._turns(best)
        fewest = max(FEWEST_RESTARTS, RESTARTED_BLOCKS // (BLOCKS_OF_A_RESTART + len(problem)))
        batch, boxed, seeds = fewest, self.exact_blocks and len(problem) <= BOXED_BLOCKS, count(1)
        while not best.done:
            self._restart(best, rules, batch if self.restarts is None else self.restarts, random)
            if self.restarts is not None:
                for _ in turns:
                    pass
                return
            if boxed and not best.done:
                best.offer_all(boxed_layouts(problem, next(seeds)))
            nodes = 0 if best.done else next(turns, 0)
            batch = max(fewest, nodes // NODES_OF_A_RESTART)  # as long as the turn took: neither waits for the other

    def _restart(self, best: Incumbent, rules: list[Rule], restarts: int, random: np.random.Generator) -> None:
        for k in range(restarts):
            if best.done:
                return
            temperature = 0.002 * np.exp(-5 * k / restarts)
            best.offer(rules[k % len(rules)].restart(best.target, temperature, random))

    def _turns(self, best: Incumbent) -> Iterator[int]:
        """Yield nodes per turn of the exact search.

        Above `exact_blocks` they are single descents; none if the search does not take the blocks.
        """
        exact = self._exact(best.problem)
        if not exact and (
            not self.exact_blocks or len(best.problem) > DESCENT_BLOCKS or pairs(best.problem) > PAIR_LIMIT
        ):
            return
        decider = Decider(best.problem, best.deadline, seed=best.limits.seed)
        if not exact:
            yield from decider.descend(best)
        else:
            yield from decider.minimise(best) if best.minimises else decider.reach(best)

    def _exact(self, problem: Problem) -> bool:
        return len(problem) <= self.exact_blocks

    def _starts(self, problem: Problem, target: int, rules: list[Rule]) -> Iterator[Integers]:
        for rule in self._rules(problem, target):
            rules.append(rule)
            yield rule.start()

    def _large_first(self, best: Incumbent) -> None:
        """Offer layouts that begin with the large blocks; may raise the bound."""
        searched = len(best.problem) <= SEARCHED_BLOCKS
        best.offer_all(layouts(best.problem, partial(self._pack_large, best)))
        if searched and not best.done:
            best.prove(window_bound(best.problem, best.bound_bytes, best.deadline))

    def _pack_large(self, best: Incumbent, large: Problem) -> Iterator[Integers]:
        found, seed = False, best.limits.seed
        if len(large) <= self.exact_blocks:
            for offsets in tight(large, best.deadline, seed):
                found = True
                yield offsets
        # By heuristics where the exact search finds nothing.
        if not found:
            seconds = max(best.deadline - time.perf_counter(), 0)
            limits = Limits(None, seconds, seed)
            restarts = max(FEWEST_RESTARTS, RESTARTED_BLOCKS // (BLOCKS_OF_A_RESTART + len(large)))
            packing = Portfolio(
                FEWEST_RESTARTS if len(best.problem) <= SEARCHED_BLOCKS else restarts, exact_blocks=0
            )._pack(large, limits)
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
        # Greedy placement knows pins, gaps and alignments.
        if not problem.plain:
            fits: tuple[Fit, ...] = ("first", "best")
            for name in GREEDY_KEYS:
                for fit in fits:
                    key = KEYS[name](problem).astype(np.float64)
                    yield Rule(problem, key, partial(self._greedy, problem, fit))

    def _greedy(self, problem: Problem, fit: Fit, key: Floats, limit: int | None) -> Integers | None:
        offsets = place(problem, order_by(key), fit)
        return offsets if limit is None or problem.peak_bytes(offsets) <= limit else None
