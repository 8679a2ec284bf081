"""The page and the short form of each kind of result, for `core/reportable.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from overspill.core.errors import RequestError
from overspill.core.reportable import Reportable
from overspill.estimation import Estimate
from overspill.placement.packing.base import Solution
from overspill.plans.comparison import Comparison
from overspill.plans.plan import Plan
from overspill.plans.sweep import Sweep

from .compare import compare_page, compare_verdict
from .estimate import estimate_page, estimate_verdict, parts_table
from .notebook import short_html
from .pack import pack_page, pack_verdict
from .page import Page, Table, Verdict, check_page, write_page
from .plan import plan_page, plan_verdict
from .recording import Recording, recording_page, recording_verdict, steps_table
from .sweep import sweep_page, sweep_table, sweep_verdict
from .terminal import as_text


def write_report(found: Reportable, path: Path, title: str | None = None) -> None:
    """Write the page of `found` to `path`. Raises RequestError if that fails."""
    check_page(path)  # before the work of making it
    write_page(path, page_of(found, title))


def explained(found: Reportable) -> str:
    """Return all of a result as text."""
    return as_text(page_of(found))


def in_notebook(found: Reportable) -> str:
    """Return a result in short, as HTML for a notebook."""
    shown = _shown(found)
    return short_html(shown.verdict(found), None if shown.table is None else shown.table(found))


def in_terminal(found: Reportable) -> str:
    """Return a result in short, as text."""
    verdict = _shown(found).verdict(found)
    figures = (f"{f.label}: {f.value}" + (f" ({f.note})" if f.note else "") for f in verdict.figures)
    return "\n  ".join((verdict.text, *figures))


def page_of(found: Reportable, title: str | None = None) -> Page:
    """Return the page of a result, with this title or a default one."""
    return _shown(found).page(found, title)


def _shown(found: Reportable) -> Shown:
    return next(SHOWN[kind] for kind in type(found).__mro__ if kind in SHOWN)


class Shown(NamedTuple):
    """How a kind of result is shown."""

    page: Callable[[Any, str | None], Page]
    """The function that makes the page, with a title or a default one."""
    verdict: Callable[[Any], Verdict]
    """The function that makes the short form, without figures that take long to find."""
    table: Callable[[Any], Table] | None = None
    """The function that makes the table which a notebook shows below the verdict."""


def _page_of_solution(found: Solution, title: str | None) -> Page:
    if found.trace is None:
        raise RequestError("the blocks of this solution are not known to it; solve a Trace, as overspill.pack does")
    return pack_page(found, found.trace, title or f"{len(found.trace.blocks)} blocks")


SHOWN: dict[type, Shown] = {
    Plan: Shown(plan_page, plan_verdict),
    Sweep: Shown(sweep_page, sweep_verdict, sweep_table),
    Comparison: Shown(compare_page, compare_verdict, lambda compared: compare_page(compared).tables[0]),
    Estimate: Shown(estimate_page, estimate_verdict, parts_table),
    Recording: Shown(recording_page, recording_verdict, steps_table),
    Solution: Shown(_page_of_solution, pack_verdict),
}
