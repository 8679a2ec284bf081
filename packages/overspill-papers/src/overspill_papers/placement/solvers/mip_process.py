"""The process that runs HiGHS on a JSON request.

A request on standard input gets an answer on standard output, all in integer units. The module imports nothing of
Overspill's, so that it can be run by its file name.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any, TypedDict

INFINITY = math.inf  # as HiGHS has it


class MipRequest(TypedDict):
    """A placement problem; lists are by block."""

    size: list[int]
    alignment: list[int]
    pinned: list[int | None]
    pairs: list[tuple[int, int]]
    """Pairs of blocks that are live together."""
    incumbent: list[int]
    """A layout's offsets."""
    lower_bound: int
    target: int
    seconds: float
    seed: int


class MipAnswer(TypedDict):
    """Nearly integer places of the blocks, or None, and the peak's lower bound."""

    places: list[float] | None
    bound: float


def solve(request: MipRequest) -> MipAnswer:
    """Find places with the lowest peak."""
    began = time.perf_counter()
    import highspy  # noqa: PLC0415 - in this process alone

    highs = _MixedProgram(request).load(highspy)
    highs.setOptionValue("time_limit", max(request["seconds"] - (time.perf_counter() - began), 0.0))
    highs.setOptionValue("random_seed", request["seed"])
    highs.setOptionValue("objective_target", float(request["target"]))
    highs.run()
    # The proven bound, and the places if it found any.
    info = highs.getInfo()
    solved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal  # mip_dual_bound is not set without a pair
    bound = info.objective_function_value if solved else max(info.mip_dual_bound, 0.0)
    places = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        places = list(highs.getSolution().col_value[1 : len(request["size"]) + 1])
    return {"places": places, "bound": bound if math.isfinite(bound) else 0.0}


class _MixedProgram:
    """The mixed integer program.

    Its columns are u, x by block, z by pair, and an integer k for each block with an alignment: x = alignment * k.
    """

    def __init__(self, request: MipRequest) -> None:
        self.request = request
        self.size, self.alignment, self.pinned = request["size"], request["alignment"], request["pinned"]
        self.pairs, self.incumbent = request["pairs"], request["incumbent"]
        self.width = max(place + size for place, size in zip(self.incumbent, self.size, strict=True))  # W
        free = (i for i, pin in enumerate(self.pinned) if pin is None)
        self.stepped = [i for i in free if self.alignment[i] > 1]

    def load(self, highspy: Any) -> Any:
        """Return HiGHS with the program, and the incumbent to start from."""
        columns, (lower, upper, starts, terms) = self._columns(), self._rows()
        program = highspy.HighsLp()
        program.col_cost_, program.col_lower_, program.col_upper_ = columns
        program.num_col_, program.num_row_ = len(columns[0]), len(lower)
        whole = program.num_col_ - 1 - len(self.size)
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kContinuous] * (program.num_col_ - whole) + [kinds.kInteger] * whole
        program.row_lower_, program.row_upper_ = lower, upper
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = starts
        program.a_matrix_.index_ = [column for column, _ in terms]
        program.a_matrix_.value_ = [value for _, value in terms]
        # One thread, up to the optimum.
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.passModel(program)
        # Start from the incumbent.
        start = highspy.HighsSolution()
        start.col_value = self._start()
        highs.setSolution(start)
        return highs

    def _columns(self) -> tuple[list[float], list[float], list[float]]:
        """Return cost, lower and upper bound of every column: (1), (5), (6)."""
        pairs, steps, width = len(self.pairs), len(self.stepped), self.width
        lower: list[float] = [self.request["lower_bound"], *(pin or 0 for pin in self.pinned), *[0] * (pairs + steps)]
        upper: list[float] = [
            width,
            *(width if pin is None else pin for pin in self.pinned),
            *[1] * pairs,
            *[width] * steps,
        ]
        return [1.0, *[0.0] * (len(lower) - 1)], lower, upper

    def _rows(self) -> tuple[list[float], list[float], list[int], list[tuple[int, float]]]:
        """Return bounds and terms of every row, and where its terms begin: (2), (3), (4)."""
        n, width, size = len(self.size), self.width, self.size
        rows: list[tuple[float, float, list[tuple[int, float]]]] = []
        rows += ((-INFINITY, -size[i], [(1 + i, 1), (0, -1)]) for i in range(n))  # (2)
        for z, (i, j) in enumerate(self.pairs, start=1 + n):
            rows.append((-INFINITY, -size[i], [(1 + i, 1), (1 + j, -1), (z, -width)]))  # (3)
            rows.append((-INFINITY, width - size[j], [(1 + j, 1), (1 + i, -1), (z, width)]))  # (4)
        for step, i in enumerate(self.stepped, start=1 + n + len(self.pairs)):
            rows.append((0, 0, [(1 + i, 1), (step, -self.alignment[i])]))
        # In HiGHS's row-wise form.
        starts = [0]
        for *_, terms in rows:
            starts.append(starts[-1] + len(terms))
        return (
            [row[0] for row in rows],
            [row[1] for row in rows],
            starts,
            [term for *_, terms in rows for term in terms],
        )

    def _start(self) -> list[float]:
        """Return the incumbent as column values."""
        places = self.incumbent
        over = [float(places[i] > places[j]) for i, j in self.pairs]
        return [self.width, *places, *over, *(places[i] // self.alignment[i] for i in self.stepped)]


if __name__ == "__main__":
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
