"""Placement as non-overlapping rectangles, solved by OR-Tools CP-SAT."""

from __future__ import annotations

import time
from importlib.util import find_spec

import numpy as np

from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.incumbent import Incumbent
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import Problem

from . import cp_sat_process
from .greedy import largest_first
from .processes import GRACE_SECONDS, ask


class CpSat(Solver):
    """Two-dimensional no-overlap: a rectangle for every piece.

    Fixed in time, as high as the block is large. It starts from a first fit. `workers` threads search; with one, the
    same seed gives the same search. OR-Tools runs in a process of its own: it and highspy each bring a libhighs, and
    one process cannot load both.
    """

    name = "cp-sat"
    summary = "constraint programming with two-dimensional no-overlap, through OR-Tools; for some 200 blocks"
    source = "OR-Tools CP-SAT, AddNoOverlap2D (developers.google.com/optimization)"

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        if find_spec("ortools") is None:
            raise RequestError("the solver 'cp-sat' needs OR-Tools: pip install overspill[cp-sat]")
        bound, capacity = problem.lower_bound_bytes, limits.capacity_bytes
        # Start from a first fit, then ask OR-Tools.
        best = Incumbent(problem, limits, bound, capacity)
        best.offer(largest_first(problem))
        left = best.deadline - time.perf_counter()
        if best.done or best.target < bound or left <= 0:
            return best.packing
        assert best.offsets is not None
        with best.kept():
            request = self._request(problem, limits, best.offsets, left)
            answer: cp_sat_process.CpSatAnswer | None = ask(
                cp_sat_process.__file__, "OR-Tools", request, left + GRACE_SECONDS
            )
            if answer is not None:
                best.prove(answer["bound"])
                if answer["offsets"] is not None:
                    best.offer(np.array(answer["offsets"], dtype=np.int64))
        return best.packing

    def _request(
        self, problem: Problem, limits: Limits, incumbent: Integers, seconds: float
    ) -> cp_sat_process.CpSatRequest:
        pieces = Pieces.of(problem)
        capacity = problem.peak_bytes(incumbent) if limits.capacity_bytes is None else limits.capacity_bytes
        # Pieces have owner, start and end; the other lists are by block.
        return {
            "owner": pieces.owner.tolist(),
            "start": pieces.start.tolist(),
            "end": pieces.end.tolist(),
            "size": problem.nbytes.tolist(),
            "alignment": problem.alignment.tolist(),
            "pinned": [None if pin == ANYWHERE else pin for pin in problem.pinned.tolist()],
            "hint": incumbent.tolist(),
            "lower_bound": problem.lower_bound_bytes,
            "capacity": capacity,
            "minimise": limits.capacity_bytes is None,
            "seconds": seconds,
            "seed": limits.seed,
            "workers": self.workers,
        }
