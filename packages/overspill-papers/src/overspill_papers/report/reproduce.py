"""A paper's figures and ours, as JSON rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.report.listing import listing, yes
from overspill_papers.papers import SCALES, TOLERANCE, Counts, Paper, Result


def result_figures(result: Result) -> dict[str, Any]:
    """Return the JSON object of `result`."""
    claim = result.claim
    return {
        "where": claim.where,
        "what": claim.what,
        "section": claim.section,
        "quote": claim.quote,
        "unit": claim.unit,
        "bound": claim.bound,
        # Theirs, ours, and what is to be known of the row.
        "paper": float(claim.value),
        "ours": None if result.ours is None else float(result.ours),
        "ratio": None if result.ratio is None else float(result.ratio),
        "agrees": result.agrees,
        "fitted": claim.fitted or None,
        "aside": claim.aside or None,
        "certain": result.certain or None,
        "repeats": claim.repeats or None,
        "counts": result.counts,
        "without": None if result.without is None else float(result.without),
        "agrees_anyway": result.agrees_anyway,
        "assumed": claim.assumed or None,
        "scaled": dict(zip(map(_times, SCALES), map(float, result.scaled), strict=False)) or None,
        "note": claim.note or None,
        "error": result.trouble or None,
    }


def reproduce_report(paper: Paper, found: Sequence[Result]) -> RenderableType:
    """Return the table of `found`, with remarks on single rows below."""
    remarks: dict[str, int] = {}
    rows = []
    for result in found:
        said = remark(result)
        number = remarks.setdefault(said, len(remarks) + 1) if said else None
        rows.append(_cells(result, number))
    # Remarks are numbered, and stand below the table.
    columns = ("where", "what", "paper", "ours", "ratio", "agrees", "note")
    parts: list[RenderableType] = [
        Text(f"{paper.title}: {counted(Counts.of(found), paper.without)}"),
        "",
        listing(columns, rows, numbers=(2, 3, 4)),
        "",
        *(Text(f"({number}) {said}") for said, number in remarks.items()),
        *([""] if remarks else []),
        *(
            [Text(f"*: does not count, for it would agree {paper.without} too.")]
            if any(result.agrees_anyway for result in found)
            else []
        ),
        Text(
            f"Ours are simulated, on {paper.machine} and the step as the paper's framework runs it; nothing was "
            "measured."
        ),
    ]
    return Group(*parts)


def counted(counts: Counts, without: str) -> str:
    """Return how many figures agree and limits are kept, in words, and which rows do not count.

    As `13 of 20 figures within 15 %; 1 of 1 limits kept; rows that do not count: 11 figures and 1 limit that would hold
    with nothing offloaded too, 7 that a constant was set by, 3 other readings, 2 that cannot fail`.
    """
    anyway = [
        f"{number} {what}{'s' * (number > 1)}"
        for number, what in ((counts.agreeing_anyway, "figure"), (counts.limits_kept_anyway, "limit"))
        if number
    ]
    beside = (
        (" and ".join(anyway), f"that would hold {without} too"),
        (counts.fitted, "by which a constant was set"),
        (counts.aside, "other readings"),
        (counts.certain, "that cannot fail"),
        (counts.repeats, "that repeat others"),
    )
    left = ", ".join(f"{number} {what}" for number, what in beside if number)
    parts = (
        f"{counts.agreeing} of {counts.figures} figures within {100 * TOLERANCE:.0f} %" if counts.figures else "",
        f"{counts.limits_kept} of {counts.limits} limits kept" if counts.limits else "",
        f"rows that do not count: {left}" if left else "",
    )
    return "; ".join(filter(None, parts))


def remark(result: Result) -> str:
    """Return a remark on a row besides its figures, or nothing."""
    return " ".join(filter(None, (result.trouble, _uncounted(result), _assumed(result), result.claim.note)))


def agreement(result: Result) -> str:
    """Return whether ours agrees, or why the row does not count, in a word."""
    claim = result.claim
    words = (claim.fitted, "fitted"), (claim.aside, "aside"), (claim.repeats, "repeats"), (result.certain, "certain")
    if (word := next((word for said, word in words if said), None)) is not None:
        return word
    return f"{yes(result.agrees) or 'no'}{'*' if result.agrees_anyway else ''}"


def _uncounted(result: Result) -> str:
    claim = result.claim
    if claim.fitted:
        return f"Does not count: {claim.fitted}"
    if claim.aside:
        return f"Another reading, not counted: {claim.aside}"
    if claim.repeats:
        return f"Does not count again: {claim.repeats}"
    return f"Does not count, for it cannot fail: {result.certain}" if result.certain else ""


def _assumed(result: Result) -> str:
    if not result.scaled:
        return ""
    ours = " and ".join(
        f"{short_figure(value)} at {_times(scale)}" for value, scale in zip(result.scaled, SCALES, strict=True)
    )
    return f"Rests on what is assumed, {result.claim.assumed}: {ours} of it."


def _times(scale: float) -> str:
    return "a third" if scale < 1 else f"{scale:g} times"


def _cells(result: Result, number: int | None) -> tuple[str, ...]:
    claim = result.claim
    bound = "" if claim.bound == "=" else f"{claim.bound} "
    return (
        claim.where,
        claim.what,
        f"{bound}{short_figure(claim.value)} {claim.unit}",
        "none" if result.ours is None else f"{short_figure(result.ours)} {claim.unit}",
        "" if result.ratio is None else f"{result.ratio:.2f}",
        agreement(result),
        "" if number is None else f"({number})",
    )


def settled(value: float) -> float:
    """Return `value`, or 0 if it is only rounding.

    A difference of equal numbers may leave a rounding error; no paper gives a figure as small as that.
    """
    return round(value, 9) + 0.0


def short_figure(value: float) -> str:
    """Return three digits, or more if the number has them before the point."""
    if not (value := settled(value)):
        return "0.0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
