"""What a paper says in a number, and what we find instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overspill.core.errors import InfeasibleBudget, RequestError

from .lab import Lab

TOLERANCE = 0.15
"""How far ours may be from the paper's figure without a word."""


@dataclass(frozen=True)
class Claim:
    """One figure of a paper: where it stands, in its own words, and how we compute ours.

    `bound` says what sort of figure it is: `=`, or `>` and `<` where the paper gives a limit only. `note` is what one
    must know of ours; where ours is more than 15 % off, it is the reason, as an experiment showed it.
    """

    paper: str
    where: str
    what: str
    quote: str
    section: str
    value: float
    unit: str
    compute: Callable[[Lab], float]
    note: str = ""
    bound: str = "="


@dataclass(frozen=True)
class Result:
    """A claim with our figure, None where there is none and `trouble` says why."""

    claim: Claim
    ours: float | None
    trouble: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.ours is None else self.ours / self.claim.value

    @property
    def agrees(self) -> bool:
        """Whether ours is within 15 % of the paper's figure, or on the right side of its limit."""
        if self.ratio is None:
            return False
        above = self.ratio >= 1 - TOLERANCE or self.claim.bound == "<"
        below = self.ratio <= 1 + TOLERANCE or self.claim.bound == ">"
        return above and below


def results(claims: tuple[Claim, ...], lab: Lab) -> Iterator[Result]:
    """Each claim's result, as it is found. A policy that finds no schedule is a result too."""
    for claim in claims:
        try:
            yield Result(claim, claim.compute(lab))
        except (InfeasibleBudget, RequestError) as error:
            yield Result(claim, None, " ".join(str(error).split()))
