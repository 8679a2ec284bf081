"""The lower bound of a layout's peak, with alignment counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .problem import Problem


def rounded(problem: Problem) -> Problem:
    """The problem with sizes rounded up to the alignments' common divisor.

    It has the same layouts.
    """
    unit = np.gcd.reduce(problem.alignment) if len(problem) else 1
    return replace(problem, nbytes=-(-problem.nbytes // unit) * unit) if unit > 1 else problem


def bound_bytes(problem: Problem) -> int:
    """The lower bound on any layout's peak, with alignment counted.

    Addresses are multiples of the greatest common divisor of the alignments, so live blocks take their rounded sizes,
    but for the padding of the highest one.
    """
    even = rounded(problem)
    padding = (even.nbytes - problem.nbytes).max(initial=0)
    return max(problem.lower_bound_bytes, int(even.load.max(initial=0) - padding))
