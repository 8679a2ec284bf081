"""A figure of a paper, and ours for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overspill.core.errors import InfeasibleBudget, RequestError

from .lab import Lab

TOLERANCE = 0.15
"""How far ours may be from the paper's figure without a word."""


@dataclass(frozen=True)
class Claim:
    """One figure of a paper, and how ours is computed.

    Where it stands, and in its own words. `bound` says what sort of figure it is: `=`, or `>` and `<` where the paper
    gives a limit only. `fitted` names the constant of ours that was set by this very row, which then shows nothing.
    `aside` says how the row reads a figure that has another row; it is shown beside that, and counts nothing either.
    `note` is what one must know of ours; where ours is more than 15 % off, it is the reason, as an experiment showed
    it.
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
    fitted: str = ""
    aside: str = ""

    @property
    def is_limit(self) -> bool:
        """Whether the paper gives a limit only."""
        return self.bound != "="


@dataclass(frozen=True)
class Result:
    """A claim with our figure.

    It is None where there is none and `trouble` says why.
    """

    claim: Claim
    ours: float | None
    trouble: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.ours is None else self.ours / self.claim.value

    @property
    def agrees(self) -> bool:
        """Whether ours agrees with the paper's figure.

        It is within 15 % of it, or on the right side of its limit.
        """
        if self.ratio is None:
            return False
        if self.claim.is_limit:
            return self.ratio >= 1 if self.claim.bound == ">" else self.ratio <= 1
        return 1 - TOLERANCE <= self.ratio <= 1 + TOLERANCE


@dataclass(frozen=True)
class Counts:
    """Numbers of figures that agree, limits, and rows that do not count.

    Figures are those that can disagree; rows do not count that are fitted, or aside.
    """

    figures: int
    agreeing: int
    limits: int
    limits_kept: int
    fitted: int
    aside: int

    @classmethod
    def of(cls, found: Sequence[Result]) -> Counts:
        """The counts of some results."""
        judged = [result for result in found if not (result.claim.fitted or result.claim.aside)]
        limits = [result for result in judged if result.claim.is_limit]
        figures = [result for result in judged if not result.claim.is_limit]
        return cls(
            len(figures),
            sum(r.agrees for r in figures),
            len(limits),
            sum(r.agrees for r in limits),
            sum(bool(result.claim.fitted) for result in found),
            sum(bool(result.claim.aside) for result in found),
        )


def results(claims: tuple[Claim, ...], lab: Lab) -> Iterator[Result]:
    """Each claim's result, as it is found.

    A policy that finds no schedule is a result too.
    """
    for claim in claims:
        try:
            yield Result(claim, claim.compute(lab))
        except (InfeasibleBudget, RequestError) as error:
            yield Result(claim, None, " ".join(str(error).split()))
