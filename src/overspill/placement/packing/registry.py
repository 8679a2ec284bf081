"""Offline solvers by name: each is one file here and one line in the registry."""

from __future__ import annotations

from overspill.core.registry import Registry

from .base import Solver
from .solvers.exact import Exact
from .solvers.greedy import Fit, Greedy
from .solvers.portfolio import Portfolio
from .solvers.skyline import Skyline

DEFAULT = "portfolio"
_FITS: tuple[Fit, ...] = ("first", "best")
_ALL: tuple[Solver, ...] = (
    Portfolio(),
    Skyline(),
    *(Skyline(key, guarded=True) for key in ("load", "area", "size", "sections")),
    *(Greedy(key, fit) for fit in _FITS for key in ("size", "lifetime", "area", "conflict", "start")),
    Exact(),
)
SOLVERS: Registry[Solver] = Registry("solver", "solvers", {solver.name: solver for solver in _ALL}, papers=("mip",))


def solver_named(name: str = DEFAULT) -> Solver:
    """Return the solver registered as `name`. Raises RequestError with the known names."""
    return SOLVERS.named(name)
