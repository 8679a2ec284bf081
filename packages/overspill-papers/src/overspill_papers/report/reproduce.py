"""A paper's figures and ours, as JSON rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.report.listing import listing, yes
from overspill_papers.papers import TOLERANCE, Counts, Paper, Result


def result_figures(result: Result) -> dict[str, Any]:
    """The JSON object of `result`."""
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
        "note": claim.note or None,
        "error": result.trouble or None,
    }


def reproduce_report(paper: Paper, found: Sequence[Result]) -> RenderableType:
    """The table of `found`, with remarks on single rows below."""
    remarks: dict[str, int] = {}
    rows = []
    for result in found:
        said = remark(result)
        number = remarks.setdefault(said, len(remarks) + 1) if said else None
        rows.append(_cells(result, number))
    # Remarks are numbered, and stand below the table.
    columns = ("where", "what", "paper", "ours", "ratio", "agrees", "note")
    parts: list[RenderableType] = [
        Text(f"{paper.title}: {counted(Counts.of(found))}"),
        "",
        listing(columns, rows, numbers=(2, 3, 4)),
        "",
        *(Text(f"({number}) {said}") for said, number in remarks.items()),
        *([""] if remarks else []),
        Text(
            f"Ours are simulated, on {paper.machine} and the step as the paper's framework runs it; nothing was measured."
        ),
    ]
    return Group(*parts)


def counted(counts: Counts) -> str:
    """How many figures agree, in words.

    As `22 of 25 figures within 15 %, 2 of 2 limits kept; 7 rows do not count, for a constant was set by them`.
    """
    said = [f"{counts.agreeing} of {counts.figures} figures within {100 * TOLERANCE:.0f} %"] if counts.figures else []
    said += [f"{counts.limits_kept} of {counts.limits} limits kept"] if counts.limits else []
    fitted = f"{counts.fitted} rows do not count, for a constant was set by them" if counts.fitted else ""
    aside = f"{counts.aside} are other readings of figures that count" if counts.aside else ""
    return "; ".join(filter(None, (", ".join(said), fitted, aside)))


def remark(result: Result) -> str:
    """A remark on a row besides its figures, or nothing."""
    return " ".join(filter(None, (result.trouble, _uncounted(result), result.claim.note)))


def agreement(result: Result) -> str:
    """Whether ours agrees, or why the row does not count.

    In a word.
    """
    claim = result.claim
    return "fitted" if claim.fitted else "aside" if claim.aside else yes(result.agrees) or "no"


def _uncounted(result: Result) -> str:
    if result.claim.fitted:
        return f"Does not count: {result.claim.fitted}"
    return f"Another reading, not counted: {result.claim.aside}" if result.claim.aside else ""


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
    """`value`, or 0 if it is only rounding.

    A difference of equals may leave some; no paper gives a figure as small as that.
    """
    return round(value, 9) + 0.0


def short_figure(value: float) -> str:
    """Three digits, more where the number has them before the point."""
    if not (value := settled(value)):
        return "0.0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
