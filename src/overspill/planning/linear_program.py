"""Build linear programs from columns and sparse rows, solved by HiGHS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import highspy
import numpy as np

Terms = list[tuple[int, float]]
"""Columns with their coefficients."""
INFINITY = highspy.kHighsInf
INTEGRAL = 1e-6
"""Values this close to 0 or 1 count as integral."""
ROWS_AN_ITERATION = 50
"""Setting up this many rows takes as long as a simplex iteration."""


class LinearProgram:
    """A linear program under construction, with sparse rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []
        self.starts: list[int] = [0]
        self.columns: list[int] = []
        self.values: list[float] = []
        self._solver: highspy.Highs | None = None

    def variable(self, upper: float = INFINITY, cost: float = 0.0) -> int:
        """Add a column in [0, upper], and return its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float = -INFINITY, upper: float = INFINITY) -> int:
        """Add lower <= sum of coefficient times column <= upper, and return the row's index."""
        for column, value in terms:
            self.columns.append(column)
            self.values.append(value)
        self.starts.append(len(self.columns))
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        return len(self.row_lower) - 1

    def solve(self) -> tuple[float, list[float]] | None:
        """Return the optimum and the columns' values there; None without a solution."""
        solver = self._solver = self._solver or self._load()
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return solver.getInfo().objective_function_value, list(solver.getSolution().col_value)

    def integral_bound(self, columns: Sequence[Sequence[int]], effort: int) -> float | None:
        """Return a bound on the optimum with `columns` 0 or 1; None without a solution.

        Branch and bound (Land and Doig 1960): the node of least bound first, on the column nearest to a half in the
        first sequence that has a fractional one. It ends after that much `effort`, about 1 a simplex iteration, with
        the least bound of open nodes.
        """
        if (found := self.solve()) is None:
            return None
        solver = self._solver
        assert solver is not None
        left: list[tuple[float, int, dict[int, float], int | None]] = []
        heappush(left, (found[0], 0, {}, _to_branch(columns, found[1])))
        spent, before = 0, set[int]()
        # Take the open node of least bound, and branch on its column.
        while left:
            bound, _, fixed, column = left[0]
            if column is None or spent > effort:
                return bound
            heappop(left)
            # Solve with the column fixed to each value; only bounds that changed are set.
            for value in (0.0, 1.0):
                chosen = {**fixed, column: value}
                for c in before | chosen.keys():
                    solver.changeColBounds(c, chosen.get(c, 0.0), chosen.get(c, self.upper[c]))
                before = set(chosen)
                found = self.solve()
                spent += solver.getInfo().simplex_iteration_count + 1 + len(self.row_lower) // ROWS_AN_ITERATION
                if found is not None:
                    heappush(left, (max(bound, found[0]), spent, chosen, _to_branch(columns, found[1])))
                elif solver.getModelStatus() != highspy.HighsModelStatus.kInfeasible:
                    heappush(left, (bound, spent, chosen, None))
        return None

    def _load(self) -> highspy.Highs:
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.cost), len(self.row_lower)
        program.col_cost_ = np.array(self.cost)
        program.col_lower_ = np.zeros(len(self.cost))
        program.col_upper_ = np.array(self.upper)
        program.row_lower_, program.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        # Rows, in compressed form.
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self.starts)
        program.a_matrix_.index_ = np.array(self.columns)
        program.a_matrix_.value_ = np.array(self.values)
        # One thread, for results that repeat.
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        solver.passModel(program)
        return solver


def _to_branch(columns: Sequence[Sequence[int]], values: Sequence[float]) -> int | None:
    """Return the column nearest to a half in the first of `columns` with a fractional one, or None."""
    for among in columns:
        column = min(among, key=lambda c: abs(values[c] - 0.5), default=None)
        if column is not None and INTEGRAL < values[column] < 1 - INTEGRAL:
            return column
    return None


def minus(column: int | None) -> list[tuple[int, float]]:
    """Return the column with coefficient -1, if it is given."""
    return [] if column is None else [(column, -1.0)]


def added(terms: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the terms with coefficients of equal columns added up, as a row needs."""
    sums: dict[int, float] = defaultdict(float)
    for column, value in terms:
        sums[column] += value
    return list(sums.items())
