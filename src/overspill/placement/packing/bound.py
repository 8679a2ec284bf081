"""The lower bound of a layout's peak, with alignment counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .problem import Problem


def rounded(problem: Problem) -> Problem:
    """Return the problem with sizes rounded up to the alignments' common divisor, which has the same layouts."""
    unit = np.gcd.reduce(problem.alignment) if len(problem) else 1
    return replace(problem, nbytes=-(-problem.nbytes // unit) * unit) if unit > 1 else problem


def bound_bytes(problem: Problem) -> int:
    """Return the lower bound on any layout's peak, with alignment counted.

    Addresses are multiples of the greatest common divisor of the alignments. So live blocks take their rounded sizes,
    except for the padding of the highest one.
    """
    even = rounded(problem)
    padding = (even.nbytes - problem.nbytes).max(initial=0)
    return max(problem.lower_bound_bytes, int(even.load.max(initial=0) - padding))
