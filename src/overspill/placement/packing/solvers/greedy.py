"""Greedy placement in a fixed order, by first fit or best fit."""

from __future__ import annotations

from typing import Literal

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing._packing import greedy
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes
from overspill.placement.packing.columns import Integers
from overspill.placement.packing.keys import KEYS, order_by
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem

Fit = Literal["first", "best"]


def place(problem: Problem, order: Integers, fit: Fit) -> Integers:
    """Return the offsets of all blocks, placed one by one.

    Pinned blocks come first, then the others in `order`. A block avoids those placed before it that are live when one
    of its pieces is. It goes to the lowest aligned offset where it meets none of them (first fit). By best fit it goes
    into the smallest hole that is large enough, of equal ones the lowest. See native/packing/greedy.hpp.
    """
    pieces = Pieces.of(problem)
    columns = (problem.nbytes, problem.alignment, problem.pinned, pieces.first(len(problem)), pieces.start, pieces.end)
    return greedy(*columns, order, best_fit=fit == "best")


def largest_first(problem: Problem) -> Integers:
    """Return offsets by first fit, largest first: a start for other solvers.

    Of equal blocks the longest-lived comes first.
    """
    return place(problem, np.lexsort((-problem.lifetime, -problem.nbytes)), "first")


class Greedy(Solver):
    """Blocks by descending key, by first or best fit.

    See `keys.KEYS`; ties are by index. Raises RequestError for an unknown key or fit, and if pinned blocks overlap.
    """

    name = "greedy"
    summary = "blocks in a fixed order, each into the lowest or the smallest hole that fits"
    source = "Wilson et al., Dynamic Storage Allocation: A Survey and Critical Review (1995)"

    def __init__(self, key: str = "size", fit: Fit = "first") -> None:
        if key not in KEYS or fit not in ("first", "best"):
            raise RequestError(f"no greedy order {key!r} by {fit!r} fit; first or best fit by {', '.join(KEYS)}")
        self.key, self.fit = key, fit
        self.name = f"{fit}-fit-{key}"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:  # noqa: ARG002  # nothing to search
        order = order_by(KEYS[self.key](problem).astype(np.float64))
        return Packing(place(problem, order, self.fit), bound_bytes(problem))
