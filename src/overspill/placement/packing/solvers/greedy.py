"""Greedy placement: the blocks come in a fixed order, each to the lowest hole (first fit) or the smallest (best fit)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing import native as native_code
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.bound import bound_bytes
from overspill.placement.packing.keys import KEYS, order_by
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import ANYWHERE, Integers, Problem

Fit = Literal["first", "best"]


def first_fit(occupied: list[tuple[int, int]], nbytes: int, alignment: int) -> int:
    """The lowest aligned offset at which `nbytes` meet none of the extents `occupied`, which are in order."""
    top = 0
    for low, high in occupied:
        if _align_up(top, alignment) + nbytes <= low:
            break
        top = max(top, high)
    return _align_up(top, alignment)


def best_fit(occupied: list[tuple[int, int]], nbytes: int, alignment: int) -> int:
    """The offset in the smallest hole with room, the lowest of equal ones; above all extents if no hole has room."""
    top = 0
    holes: list[tuple[int, int]] = []
    for low, high in occupied:
        if _align_up(top, alignment) + nbytes <= low:
            holes.append((low - top, top))
        top = max(top, high)
    return _align_up(min(holes, default=(0, top))[1], alignment)


def _align_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def place(problem: Problem, order: Integers, fit: Fit, *, native: bool | None = None) -> Integers:
    """The offsets of all blocks: the pinned ones lie where they must, then the others come in `order`.

    A block avoids those placed before it that are live when one of its pieces is.
    """
    pieces = Pieces.of(problem)
    first = pieces.first(len(problem))
    if native_code.chosen(native):
        columns = (problem.nbytes, problem.alignment, problem.pinned, first, pieces.start, pieces.end)
        return native_code.greedy(*columns, order, best_fit=fit == "best")
    pairs = list(zip(pieces.start.tolist(), pieces.end.tolist(), strict=True))
    lives = [pairs[a:b] for a, b in pairwise(first.tolist())]
    choose = first_fit if fit == "first" else best_fit
    offsets: dict[int, int] = {}
    held = np.flatnonzero(problem.pinned != ANYWHERE).tolist()
    for block in held:
        offsets[block] = int(problem.pinned[block])
    for block in order.tolist():
        if block in offsets:
            continue
        occupied = sorted(
            (offset, offset + int(problem.nbytes[other]))
            for other, offset in offsets.items()
            if any(a < d and c < b for a, b in lives[block] for c, d in lives[other])
        )
        offsets[block] = choose(occupied, int(problem.nbytes[block]), int(problem.alignment[block]))
    return np.array([offsets[block] for block in range(len(problem))], dtype=np.int64)


def largest_first(problem: Problem) -> Integers:
    """Offsets by first fit, the largest block first and of equal ones the longest-lived: a start for other solvers."""
    return place(problem, np.lexsort((-problem.lifetime, -problem.nbytes)), "first")


class Greedy(Solver):
    """Blocks by descending key (see `keys.KEYS`), ties by index, by first or best fit.

    Raises RequestError for an unknown key or fit, and where pinned blocks lie on one another.
    """

    name = "greedy"
    summary = "blocks in a fixed order, each into the lowest or the smallest hole that fits"
    source = "Wilson et al., Dynamic Storage Allocation: A Survey and Critical Review (1995)"

    def __init__(self, key: str = "size", fit: Fit = "first", *, native: bool | None = None) -> None:
        if key not in KEYS or fit not in ("first", "best"):
            raise RequestError(f"no greedy order {key!r} by {fit!r} fit; first or best fit by {', '.join(KEYS)}")
        self.key, self.fit, self.native = key, fit, native
        self.name = f"{fit}-fit-{key}"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:  # noqa: ARG002  # nothing to search
        order = order_by(KEYS[self.key](problem).astype(np.float64))
        return Packing(place(problem, order, self.fit, native=self.native), bound_bytes(problem))
