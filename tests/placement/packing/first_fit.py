"""A plain offline solver: what the files, the command and the pictures are tried with."""

from __future__ import annotations

import numpy as np

from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.problem import ANYWHERE, Problem


class FirstFit(Solver):
    """Places pinned blocks, then the others from the largest, each at the lowest address where it meets no other."""

    name = "portfolio"
    summary = "first fit by size"
    source = "Wilson, Johnstone, Neely, Boles: Dynamic Storage Allocation, 1995"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        free = problem.pinned == ANYWHERE
        offsets = np.where(free, 0, problem.pinned)
        done: list[int] = []
        for i in sorted(range(len(problem)), key=lambda i: (free[i], -problem.nbytes[i])):
            spans = sorted((offsets[j], offsets[j] + problem.nbytes[j]) for j in done if _meet(problem, i, j))
            if free[i]:
                offsets[i] = _lowest(spans, int(problem.nbytes[i]), int(problem.alignment[i]))
            done.append(i)
        return Packing(offsets, problem.lower_bound_bytes)


def _meet(problem: Problem, i: int, j: int) -> bool:
    return any(a < d and c < b for a, b in _pieces(problem, i) for c, d in _pieces(problem, j))


def _pieces(problem: Problem, i: int) -> list[tuple[int, int]]:
    edges = [problem.start[i], *(edge for gap in problem.gaps(i) for edge in gap), problem.end[i]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _lowest(spans: list[tuple[int, int]], nbytes: int, alignment: int) -> int:
    at = 0
    for low, high in spans:
        if at + nbytes <= low:
            break
        at = max(at, -(-high // alignment) * alignment)
    return at
