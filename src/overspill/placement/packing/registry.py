"""The offline solvers by name. A solver is one file here and one line in the registry."""

from __future__ import annotations

from difflib import get_close_matches

from overspill.core.errors import RequestError

from .base import Solver
from .solvers.cp_sat import CpSat
from .solvers.exact import Exact
from .solvers.greedy import Fit, Greedy
from .solvers.mip import Mip
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
    Mip(),
    CpSat(),
)
SOLVERS: dict[str, Solver] = {solver.name: solver for solver in _ALL}


def solver_named(name: str = DEFAULT) -> Solver:
    """The solver registered as `name`. Raises RequestError with the names that exist."""
    try:
        return SOLVERS[name]
    except KeyError:
        close = get_close_matches(name, SOLVERS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise RequestError(f"unknown solver {name!r}{hint} Solvers: {', '.join(SOLVERS)}") from None
