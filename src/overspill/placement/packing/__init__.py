"""Offline placement: solvers that turn a Trace into a Layout, with a proven bound on the needs of any layout."""

from .base import LEAST_GAIN as LEAST_GAIN
from .base import Limits as Limits
from .base import Solution as Solution
from .base import Solver as Solver
from .registry import DEFAULT as DEFAULT
from .registry import SOLVERS as SOLVERS
from .registry import solver_named as solver_named
