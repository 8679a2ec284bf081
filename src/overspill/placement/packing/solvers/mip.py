"""Placement as a mixed integer program, as published with the best-fit heuristic, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import highspy
import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.pieces import Pieces
from overspill.placement.packing.problem import ANYWHERE, Integers, Problem

from .portfolio import Portfolio

PAIR_LIMIT = 200_000
"""How many pairs of blocks that live together are taken: each is a binary variable and two rows."""
RESTARTS = 20
"""How many restarts the heuristics have before the program is given to HiGHS."""
INFINITY = highspy.kHighsInf
Floats = NDArray[np.float64]
UNIT_TOLERANCE, TOLERANCE = 1e-4, 1e-6
"""By how many units, and by what share of itself, a bound of HiGHS may be too high."""


class Mip(Solver):
    """Equations (1) to (6) of Sekiyama et al., section 3.1, with W the peak of the heuristics' best layout.

    That layout, of the portfolio without its exact search, is also where it starts.

    Beyond them: u is at least the lower bound, and x_i is a multiple of block i's alignment, or its pinned address.
    """

    name = "mip"
    summary = "mixed integer program with an order variable for every pair, through HiGHS; for some 30 blocks"
    source = "Sekiyama et al., Profile-guided memory optimization for deep neural networks, 2018, section 3.1"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        pairs = Pieces.of(problem).pairs()
        if len(pairs) > PAIR_LIMIT:
            raise RequestError(
                f"{len(pairs)} pairs of blocks live together, and the solver 'mip' takes {PAIR_LIMIT}; 'portfolio' takes more"
            )
        incumbent = Portfolio(RESTARTS, exact_blocks=0)._pack(problem, limits).offsets
        assert incumbent is not None
        target = problem.lower_bound_bytes if limits.capacity_bytes is None else limits.capacity_bytes
        if problem.peak_bytes(incumbent) <= target:
            return Packing(incumbent, problem.lower_bound_bytes)
        program = _Program(problem, pairs, incumbent)
        offsets, bound = program.solve(target, limits)
        return Packing(offsets, max(bound, problem.lower_bound_bytes))


@dataclass(frozen=True)
class _Row:
    terms: list[tuple[int, float]]
    lower: float
    upper: float


class _Program:
    """Its columns are u, x by block, z by pair, and a whole number k for each block with an alignment: x = alignment * k."""

    def __init__(self, problem: Problem, pairs: Sequence[tuple[int, int]], incumbent: Integers) -> None:
        self.problem, self.pairs, self.incumbent = problem, pairs, incumbent
        self.size = problem.nbytes
        self.width = problem.peak_bytes(incumbent)  # W
        self.alignment = problem.alignment.tolist()
        self.stepped = [i for i, step in enumerate(self.alignment) if step > 1 and problem.pinned[i] == ANYWHERE]

    def solve(self, target: int, limits: Limits) -> tuple[Integers, int]:
        """The best offsets found and the proven bound."""
        highs = self._load()
        highs.setOptionValue("time_limit", limits.time_limit_seconds)
        highs.setOptionValue("random_seed", limits.seed)
        highs.setOptionValue("objective_target", float(target))
        highs.run()
        info = highs.getInfo()
        solved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal  # mip_dual_bound is not set without a pair
        proven = info.objective_function_value if solved else max(info.mip_dual_bound, 0.0)
        offsets = self.incumbent
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            places = np.array(highs.getSolution().col_value[1 : len(self.size) + 1])
            offsets = min(offsets, self._let_down(places), key=self.problem.peak_bytes)
        proven -= max(UNIT_TOLERANCE, TOLERANCE * proven)
        bound = ceil(proven) if np.isfinite(proven) else 0
        return offsets, min(bound, self.problem.peak_bytes(offsets))

    def _load(self) -> highspy.Highs:
        columns, rows = self._columns(), self._rows()
        program = highspy.HighsLp()
        program.col_cost_, program.col_lower_, program.col_upper_ = columns
        program.num_col_, program.num_row_ = len(columns[0]), len(rows)
        whole = program.num_col_ - 1 - len(self.size)
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kContinuous] * (program.num_col_ - whole) + [kinds.kInteger] * whole
        program.row_lower_ = np.array([row.lower for row in rows])
        program.row_upper_ = np.array([row.upper for row in rows])
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(row.terms) for row in rows)])
        program.a_matrix_.index_ = np.array([column for row in rows for column, _ in row.terms])
        program.a_matrix_.value_ = np.array([value for row in rows for _, value in row.terms])
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.passModel(program)
        start = highspy.HighsSolution()
        start.col_value = self._start()
        highs.setSolution(start)
        return highs

    def _columns(self) -> tuple[Floats, Floats, Floats]:
        """Cost, lower and upper bound of every column: (1), (5), (6)."""
        n, pairs, steps = len(self.size), len(self.pairs), len(self.stepped)
        free = self.problem.pinned == ANYWHERE
        pin = np.where(free, 0, self.problem.pinned)
        lower = np.concatenate([[self.problem.lower_bound_bytes], pin, np.zeros(pairs + steps)])
        upper = np.concatenate([[self.width], np.where(free, self.width, pin), np.ones(pairs), [self.width] * steps])
        return np.concatenate([[1.0], np.zeros(n + pairs + steps)]), lower, upper

    def _rows(self) -> list[_Row]:
        n, width, size = len(self.size), self.width, self.size.tolist()
        rows = [_Row([(1 + i, 1.0), (0, -1.0)], -INFINITY, -size[i]) for i in range(n)]  # (2)
        for z, (i, j) in enumerate(self.pairs, start=1 + n):
            rows.append(_Row([(1 + i, 1.0), (1 + j, -1.0), (z, -width)], -INFINITY, -size[i]))  # (3)
            rows.append(_Row([(1 + j, 1.0), (1 + i, -1.0), (z, width)], -INFINITY, width - size[j]))  # (4)
        for step, i in enumerate(self.stepped, start=1 + n + len(self.pairs)):
            rows.append(_Row([(1 + i, 1.0), (step, -self.alignment[i])], 0.0, 0.0))
        return rows

    def _start(self) -> list[float]:
        """The incumbent as values of the columns."""
        places = self.incumbent.tolist()
        over = [float(places[i] > places[j]) for i, j in self.pairs]
        return [self.width, *places, *over, *(places[i] // self.alignment[i] for i in self.stepped)]

    def _let_down(self, places: Floats) -> Integers:
        """Whole offsets in the order of `places`, each as low as it goes above those under it."""
        problem = self.problem
        under: list[list[int]] = [[] for _ in self.size]
        for i, j in self.pairs:
            low, high = (i, j) if places[i] < places[j] else (j, i)
            under[high].append(low)
        offsets = np.zeros(len(self.size), dtype=np.int64)
        for block in np.argsort(places, kind="stable").tolist():
            top = max((int(offsets[other] + problem.nbytes[other]) for other in under[block]), default=0)
            step = int(problem.alignment[block])
            pinned = int(problem.pinned[block])
            offsets[block] = -(-top // step) * step if pinned == ANYWHERE else pinned
        return offsets
