"""A figure of a paper, and Overspill's figure for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isclose
from types import MappingProxyType

from overspill.core.errors import InfeasibleBudgetError, RequestError

from .lab import Lab
from .workers import StillMadeError

TOLERANCE = 0.15
"""The distance from the paper's figure up to which ours needs no explanation."""
SCALES = (1 / 3, 3)
"""Factors on an assumed constant for which our figures are shown too."""


@dataclass(frozen=True)
class Claim:
    """One figure of a paper, and the computation of Overspill's."""

    paper: str
    where: str
    """The figure's place in the paper."""
    what: str
    quote: str
    """The paper's own words."""
    section: str
    value: float
    unit: str
    compute: Callable[[Lab], float]
    note: str = ""
    """What a reader must know of our figure; where it is more than 15 % off, the reason, as an experiment showed it."""
    bound: str = "="
    """`=`, or `>` and `<` where the paper gives a limit only."""
    fitted: str = ""
    """The constant of ours that was set by this row, which then proves nothing."""
    aside: str = ""
    """How the row reads a figure that has another row; it is shown next to that row, and does not count."""
    certain: str = ""
    """Why the row holds by construction; such a row does not count."""
    repeats: str = ""
    """The counted rows whose content this row repeats; such a row does not count."""
    assumed: str = ""
    """The constant, assumed and not measured, on which our figure depends."""

    @property
    def is_limit(self) -> bool:
        """Whether the paper gives a limit only."""
        return self.bound != "="


@dataclass(frozen=True)
class Result:
    """A claim with our figure."""

    claim: Claim
    ours: float | None
    """None without a figure; then `trouble` has the reason."""
    trouble: str = ""
    without: float | None = None
    """Our figure without the paper's mechanism; None without such a figure."""
    scaled: tuple[float, ...] = ()
    """Our figures with the assumed constant at each of SCALES."""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.ours is None else self.ours / self.claim.value

    @property
    def agrees(self) -> bool:
        """Whether ours agrees with the paper's figure: within 15 % of it, or on the right side of its limit."""
        return _agrees(self.claim, self.ours)

    @property
    def agrees_anyway(self) -> bool:
        """Whether ours agrees, and would without the paper's mechanism.

        A limit that is just met without it, as when a policy is compared with itself, would not.
        """
        just = self.claim.is_limit and self.without is not None and isclose(self.without, self.claim.value)
        return self.agrees and not just and _agrees(self.claim, self.without)

    @property
    def certain(self) -> str:
        """Why the row could not fail; empty otherwise."""
        if self.claim.is_limit and self.ours is not None and isclose(self.ours, self.claim.value):
            return "ours is the limit itself."
        return self.claim.certain

    @property
    def counts(self) -> bool:
        """Whether the row tells of the mechanism.

        It could fail, repeats no other row, and would not agree without the mechanism.
        """
        return self.is_judged and not self.agrees_anyway

    @property
    def is_judged(self) -> bool:
        """Whether the row could fail, and repeats no other row."""
        claim = self.claim
        return not (claim.fitted or claim.aside or claim.repeats or self.certain)


def _agrees(claim: Claim, ours: float | None) -> bool:
    if ours is None:
        return False
    ratio = ours / claim.value
    if claim.is_limit:
        return ratio >= 1 if claim.bound == ">" else ratio <= 1
    return 1 - TOLERANCE <= ratio <= 1 + TOLERANCE


@dataclass(frozen=True)
class Counts:
    """Numbers of figures that agree, of limits that are kept, and of rows that do not count."""

    figures: int
    agreeing: int
    agreeing_anyway: int
    """Figures beside these, which agree without the paper's mechanism too."""
    limits: int
    limits_kept: int
    limits_kept_anyway: int
    """Limits beside these, which are kept without the paper's mechanism too."""
    fitted: int
    aside: int
    certain: int
    repeats: int

    @classmethod
    def of(cls, found: Sequence[Result]) -> Counts:
        """Return the counts of some results."""
        limits = [result for result in found if result.counts and result.claim.is_limit]
        figures = [result for result in found if result.counts and not result.claim.is_limit]
        anyway = [result.claim.is_limit for result in found if result.is_judged and result.agrees_anyway]
        return cls(
            len(figures),
            sum(r.agrees for r in figures),
            anyway.count(False),
            len(limits),
            sum(r.agrees for r in limits),
            anyway.count(True),
            sum(bool(result.claim.fitted) for result in found),
            sum(bool(result.claim.aside) for result in found),
            sum(bool(result.certain) for result in found),
            sum(bool(result.claim.repeats) for result in found),
        )


def results(claims: tuple[Claim, ...], lab: Lab, instead: Mapping[str, str] = MappingProxyType({})) -> Iterator[Result]:
    """Yield each claim's result, in their order.

    A policy that finds no schedule is a result too. `instead` names the replacements of the paper's mechanism for
    `Result.without`. Claims that need results still in progress are tried again.
    """
    without, found = lab.instead_of(instead) if instead else None, dict[int, Result]()

    def is_found(number: int) -> bool:
        if number not in found:
            with suppress(StillMadeError):
                found[number] = _result(claims[number], lab, without)
        return number in found

    for first in range(len(claims)):
        while not is_found(first):
            for later in range(first + 1, len(claims)):
                is_found(later)
            lab.workers.wait()
        yield found[first]


def _result(claim: Claim, lab: Lab, without: Lab | None) -> Result:
    """Return the claim with our figure, and with that in the lab `without` the mechanism."""
    ours, trouble = _computed(claim, lab)
    result = Result(claim, ours, trouble)
    if claim.assumed and ours is not None:
        result = replace(result, scaled=tuple(claim.compute(lab.scaled(scale)) for scale in SCALES))
    if without is not None and result.is_judged and result.agrees:
        result = replace(result, without=_computed(claim, without)[0])
    return result


def _computed(claim: Claim, lab: Lab) -> tuple[float | None, str]:
    """Return our figure, or None and the reason."""
    try:
        return claim.compute(lab), ""
    except (InfeasibleBudgetError, RequestError) as error:
        return None, " ".join(str(error).split())
