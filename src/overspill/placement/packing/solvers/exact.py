"""The exact solver: branch and bound that finds layouts or proves that none exists.

It finds layouts at hard capacities too. The search is that of MiniMalloc's canonical solutions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle

import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import RequestError
from overspill.placement.packing._packing import ExactSearch
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.columns import Integers
from overspill.placement.packing.incumbent import Incumbent
from overspill.placement.packing.infeasible_core import infeasible_core
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem

from .exact_model import ExactModel
from .greedy import largest_first

PREORDERS = ("WAT", "TAW", "TWA")
"""Keys of the preorders: lifetime (W), area (A), total of the fullest section (T), as in minimalloc."""
NOISES = (0.05, 0.1, 0.25)
"""Standard deviations of the logarithm of the noise on keys."""
_FITS, _INFEASIBLE = 1, 0  # outcomes of the native search; -1: not known within the limits
PAIR_LIMIT = 2 * 10**8
"""Most pairs of block and section, or of blocks that live together, at 4 bytes each."""


@dataclass(frozen=True, eq=False)
class SearchRun:
    """One run of the search: its preorder, and its node limit."""

    keys: str
    noise: NDArray[np.float64]
    live: bool
    node_limit: int


def turn(number: int, blocks: int, draw: np.random.Generator) -> Iterator[SearchRun]:
    """Yield one turn of the round robin: each preorder, then noisy restarts.

    Limits double from turn to turn. After the first turn the restarts take as many nodes as the rest, with limits in
    Luby's sequence (Luby, Sinclair, Zuckerman 1993). The time of a search has a heavy tail, and most luck is had early.
    """
    shortest = 2 * blocks
    limit = shortest << number
    yield from (SearchRun(keys, np.ones((blocks, 3)), True, limit) for keys in PREORDERS)
    left = len(PREORDERS) * limit if number else 0
    for keys, length in zip(cycle(PREORDERS), _luby(), strict=False):
        if left <= 0:
            return
        noise = np.exp(draw.choice(NOISES) * draw.standard_normal((blocks, 3)))
        yield SearchRun(keys, noise, bool(draw.integers(2)), shortest * length)
        left -= shortest * length


def _luby() -> Iterator[int]:
    """Yield Luby's sequence: 1, 1, 2, 1, 1, 2, 4, 1 and so on.

    Each power of two follows two runs of all that came before it.
    """
    for number in count(1):
        while number & (number + 1):  # not of the form 2**k - 1
            number -= (1 << (number.bit_length() - 1)) - 1  # noqa: PLW2901 - the place in the run that repeats
        yield (number + 1) // 2


@dataclass(frozen=True, eq=False)
class Decided:
    """Whether all blocks fit (None: not known), and the offsets in bytes."""

    fits: bool | None
    offsets: Integers | None = None


class Decider:
    """Decides capacities of one problem until a deadline (of time.perf_counter), and counts `nodes`."""

    def __init__(self, problem: Problem, deadline: float, *, seed: int = 0) -> None:
        self.problem = problem
        self.deadline, self.seed = deadline, seed
        self.nodes = 0
        self.model = model = ExactModel.of(problem)
        self._search = ExactSearch(
            model.sections,
            model.pieces.first(len(problem)),
            model.pieces.start,
            model.pieces.end,
            model.size,
            model.alignment,
            model.pinned,
            model.below,
            problem.lifetime,
        )

    def decide(self, capacity_bytes: int) -> Decided:
        """Return whether a layout has a peak within the capacity."""
        draw = np.random.default_rng(self.seed)
        number = 0
        while (decision := self._turn(number, capacity_bytes, draw)).fits is None and not self.late:
            number += 1
        return decision

    def attempt(self, capacity_bytes: int, attempt: SearchRun) -> Decided:
        """Make one attempt at a capacity."""
        outcome, nodes, offsets = self._search.attempt(
            self.model.highest(capacity_bytes),
            self.model.ceiling(capacity_bytes),
            attempt.keys,
            attempt.noise,
            attempt.live,
            attempt.node_limit,
            self.deadline - time.perf_counter(),
        )
        self.nodes += nodes
        if outcome == _FITS:
            return Decided(True, np.array(offsets, dtype=np.int64) * self.model.unit)
        return Decided(False if outcome == _INFEASIBLE else None)

    def minimise(self, best: Incumbent) -> Iterator[int]:
        """Lower `best` and prove better bounds until done; yields nodes per turn.

        Each turn is made at several capacities. One is the bound, which takes twice as many nodes, and which a turn may
        meet or raise. One is half of the way from there to the best peak; as long as that fails, half of the rest.
        """
        step, draw = self.model.step_bytes, np.random.default_rng(self.seed)
        best.prove(_up(best.bound_bytes, step))
        for number in count():
            before = self.nodes
            capacity = best.bound_bytes
            while best.bound_bytes <= capacity < best.peak and not self.late:
                decision = self._turn(number + (capacity == best.bound_bytes), capacity, draw)
                # Proven infeasible: the bound rises. Else go on half-way to the best peak.
                if decision.fits is False:
                    best.prove(capacity + step)
                    capacity += step
                    continue
                if decision.offsets is not None:
                    best.offer(decision.offsets)
                    capacity = best.bound_bytes
                capacity += _up(best.peak - capacity, 2 * step) // 2
            if best.done:
                return
            yield self.nodes - before

    def reach(self, best: Incumbent) -> Iterator[int]:
        """Look for a layout within the target until done; yields nodes per turn."""
        draw = np.random.default_rng(self.seed)
        for number in count():
            before = self.nodes
            decision = self._turn(number, best.target, draw)
            best.offer(decision.offsets)
            if best.done or decision.fits is False:
                return
            yield self.nodes - before

    def descend(self, best: Incumbent) -> Iterator[int]:
        """Search for a layout with few backtracks until done; yields nodes.

        It may backtrack once for each four blocks. The layout is within the target of `best`.
        """
        draw = np.random.default_rng(self.seed)
        blocks = len(self.problem)
        for number in count():
            for run in turn(number, blocks, draw):
                before = self.nodes
                best.offer(self.attempt(best.target, replace(run, node_limit=blocks + blocks // 4)).offsets)
                if best.done:
                    return
                yield self.nodes - before

    def _turn(self, number: int, capacity_bytes: int, draw: np.random.Generator) -> Decided:
        for attempt in turn(number, len(self.problem), draw):
            decision = self.attempt(capacity_bytes, attempt)
            if decision.fits is not None or self.late:
                return decision
        return Decided(None)

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() >= self.deadline


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


class Exact(Solver):
    """The optimum, or a proof of infeasibility, within the time limit; otherwise the best layout and bound."""

    name = "exact"
    summary = "canonical branch and bound; proves optima and infeasible capacities, names the infeasible core"
    source = "M. D. Moffitt, MiniMalloc, ASPLOS 2023; preorders with noisy restarts and skip strengthening are ours"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        deadline = time.perf_counter() + limits.time_limit_seconds
        _refuse_large(problem)
        bound, capacity = problem.lower_bound_bytes, limits.capacity_bytes
        best = Incumbent(problem, limits, bound, None if capacity is None else max(capacity, bound))
        best.offer(largest_first(problem))
        core: tuple[int, ...] = ()
        with best.kept():
            # Without a capacity, lower the peak and raise the bound until they meet.
            decider = Decider(problem, deadline, seed=limits.seed)
            if capacity is None:
                for _ in decider.minimise(best):
                    pass
                return best.packing
            # A capacity to decide; if it is too small, name the blocks to blame.
            if capacity >= bound:
                decision = decider.decide(capacity)
                best.offer(decision.offsets)
                if decision.fits is not False:
                    return best.packing
                step = decider.model.step_bytes
                best.prove(capacity // step * step + step)
            core = infeasible_core(problem, capacity, self._infeasible(limits), deadline)
        return replace(best.packing, infeasible_core=core)

    def _infeasible(self, limits: Limits) -> Callable[[Problem, int, float], bool]:
        def proven(problem: Problem, capacity_bytes: int, deadline: float) -> bool:
            decider = Decider(problem, deadline, seed=limits.seed)
            return decider.decide(capacity_bytes).fits is False

        return proven


def pairs(problem: Problem) -> int:
    """Return how many numbers the search keeps, of blocks and their sections, or of blocks that live together."""
    pieces = Pieces.of(problem)
    starts = np.sort(pieces.start)
    together = np.searchsorted(starts, pieces.end) - np.searchsorted(starts, pieces.start)
    return int(max((pieces.end - pieces.start).sum(), 2 * together.sum()))


def _refuse_large(problem: Problem) -> None:
    """Raise RequestError for a problem that would not fit in memory."""
    if pairs(problem) > PAIR_LIMIT:
        raise RequestError(
            f"{len(problem)} blocks are too many for the solver 'exact': more than {PAIR_LIMIT} pairs of blocks live "
            "together; 'portfolio' takes them"
        )
