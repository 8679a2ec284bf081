"""Placement as a mixed integer program, solved by HiGHS, as published with the best-fit heuristic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.incumbent import Incumbent
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.portfolio import Portfolio

from . import mip_process
from .processes import GRACE_SECONDS, ask

PAIR_LIMIT = 200_000
"""Most pairs of blocks that live together: each is a binary variable and two rows."""
RESTARTS = 20
"""Restarts of the heuristics before HiGHS gets the program."""
UNIT_TOLERANCE, TOLERANCE = 1e-4, 1e-6
"""Error of HiGHS's bound, in units and as a share of itself."""


class Mip(Solver):
    """Equations (1) to (6) of Sekiyama et al., section 3.1.

    W is the peak of the heuristics' best layout. The solver also starts from that layout, of the portfolio without its
    exact search. Two constraints are added: u is at least the lower bound, and x_i is a multiple of block i's
    alignment, or its pinned address.

    HiGHS runs in a separate process, which ends with the time limit. Numbers of very different sizes can make it
    compute for minutes without checking the time.
    """

    name = "mip"
    summary = "mixed integer program with an order variable for every pair, through HiGHS; for some 30 blocks"
    source = "Sekiyama et al., Profile-guided memory optimization for deep neural networks, 2018, section 3.1"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        began = time.perf_counter()
        pairs = Pieces.of(problem).pairs()
        if len(pairs) > PAIR_LIMIT:
            raise RequestError(
                f"{len(pairs)} pairs of blocks live together, and the solver 'mip' takes {PAIR_LIMIT}; 'portfolio' "
                "takes more"
            )
        # Start from the heuristics' layout.
        start = Portfolio(RESTARTS, exact_blocks=0)._pack(problem, limits)
        assert start.offsets is not None
        bound = problem.lower_bound_bytes
        best = Incumbent(problem, limits, bound, limits.capacity_bytes)
        best.offer(start.offsets)
        left = limits.time_limit_seconds - (time.perf_counter() - began)
        if start.stopped or best.done or left <= 0:
            return replace(best.packing, stopped=start.stopped)
        # Ask HiGHS; its numbers are inexact, so its places are packed down and checked.
        request: mip_process.MipRequest = {
            "size": problem.nbytes.tolist(),
            "alignment": problem.alignment.tolist(),
            "pinned": [None if pin == ANYWHERE else pin for pin in problem.pinned.tolist()],
            "pairs": pairs,
            "incumbent": start.offsets.tolist(),
            "lower_bound": bound,
            "target": best.target,
            "seconds": left,
            "seed": limits.seed,
        }
        with best.kept():
            answer: mip_process.MipAnswer | None = ask(mip_process.__file__, "HiGHS", request, left + GRACE_SECONDS)
            if answer is None:
                return best.packing
            # Check what it found, and keep a margin on what it proved.
            if answer["places"] is not None:
                found = _let_down(problem, pairs, answer["places"])
                if _apart(
                    problem, pairs, found
                ):  # or HiGHS, whose numbers are not exact, took too little room for enough
                    best.offer(found)
            proven = answer["bound"] - max(UNIT_TOLERANCE, TOLERANCE * answer["bound"])
            best.prove(min(ceil(proven), best.peak))
        return best.packing


def _let_down(problem: Problem, pairs: Sequence[tuple[int, int]], places: Sequence[float]) -> Integers:
    """Return integer offsets in the order of `places`, each as low as possible."""
    order = np.argsort(places, kind="stable").tolist()
    rank = {block: at for at, block in enumerate(order)}
    under: list[list[int]] = [[] for _ in places]
    for pair in pairs:
        low, high = sorted(pair, key=rank.__getitem__)
        under[high].append(low)
    offsets = np.zeros(len(problem), dtype=np.int64)
    for block in order:
        top = max((int(offsets[other] + problem.nbytes[other]) for other in under[block]), default=0)
        step = int(problem.alignment[block])
        pinned = int(problem.pinned[block])
        offsets[block] = -(-top // step) * step if pinned == ANYWHERE else pinned
    return offsets


def _apart(problem: Problem, pairs: Sequence[tuple[int, int]], offsets: Integers) -> bool:
    """Return whether no two blocks that are live together share a byte."""
    one, two = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    end = offsets + problem.nbytes
    return bool(((end[one] <= offsets[two]) | (end[two] <= offsets[one])).all())


MIP = Mip()
