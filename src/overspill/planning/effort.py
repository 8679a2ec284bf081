"""The amount of work that planning may take, for `auto` and for lower bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from overspill.core.errors import RequestError

VARIABLE = "OVERSPILL_EFFORT"
"""Environment variable that scales the default effort: `0.1` plans ten times faster, for somewhat slower steps."""
EFFORT = ContextVar("overspill_effort", default=1.0)
"""Share of its effort with which a policy plans at present."""


@contextmanager
def at_effort(share: float) -> Iterator[None]:
    """Let policies plan with this share of their effort inside the block."""
    token = EFFORT.set(share)
    try:
        yield
    finally:
        EFFORT.reset(token)


@dataclass(frozen=True)
class Effort:
    """Limits of search and bound in counts, not seconds, so that plans are reproducible."""

    evaluations: int = 8_000_000
    """Candidates that the search evaluates in all; the default takes up to three seconds on one core."""
    attempts_per_tensor: int = 500
    """Plans tried for each tensor that may be recomputed."""
    simplex_iterations: int = 20_000
    """Simplex iterations that branch and bound in the lower bound may take."""

    def scaled(self, factor: float) -> Effort:
        """Return this effort times `factor`, at least 1 of each."""
        return Effort(
            max(1, int(self.evaluations * factor)),
            max(1, int(self.attempts_per_tensor * factor)),
            max(1, int(self.simplex_iterations * factor)),
        )

    @classmethod
    def usual(cls) -> Effort:
        """Return the default, scaled by the environment variable OVERSPILL_EFFORT. Raises RequestError."""
        text = os.environ.get(VARIABLE, "1")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not 0.0 < factor < float("inf"):
            raise RequestError(f"{VARIABLE}={text}: it is a factor above 0, as 0.1 or 5")
        return cls().scaled(factor)
