"""The page and the short form of each kind of result. For `core/reportable.py`."""

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
from overspill.report.page import Page, Table, Verdict, check_page, write_page
from overspill.report.recording import Recording
from overspill.report.sweep import sweep_table

from .compare import compare_page, compare_table, compare_verdict
from .estimate import estimate_page, estimate_table, estimate_verdict
from .notebook import short_html
from .pack import pack_page, pack_verdict
from .plan import plan_page, plan_verdict
from .recording import recording_page, recording_verdict, steps_table
from .sweep import sweep_page, sweep_verdict_of


def write_report(found: Reportable, path: Path, title: str | None = None) -> None:
    """Write the page of `found` to `path`. Raises RequestError."""
    check_page(path)  # before the work of making it
    write_page(path, page_of(found, title))


def in_notebook(found: Reportable) -> str:
    """A result in short, as HTML for a notebook."""
    return short_html(*_short_of(found))


def in_terminal(found: Reportable) -> str:
    """A result in short, as text."""
    verdict, _ = _short_of(found)
    figures = (f"{f.label}: {f.value}" + (f" ({f.note})" if f.note else "") for f in verdict.figures)
    return "\n  ".join((verdict.text, *figures))


def page_of(found: Reportable, title: str | None = None) -> Page:
    """The page of a result, with this title or a default one."""
    return _shown(found).page(found, title)


def _short_of(found: Reportable) -> tuple[Verdict, Table | None]:
    shown = _shown(found)
    return shown.verdict(found), None if shown.table is None else shown.table(found)


def _shown(found: Reportable) -> Shown:
    return next(SHOWN[kind] for kind in type(found).__mro__ if kind in SHOWN)


class Shown(NamedTuple):
    """How a kind of result is shown: its page, with a title or a default one, its verdict, and its main table."""

    page: Callable[[Any, str | None], Page]
    verdict: Callable[[Any], Verdict]
    table: Callable[[Any], Table | None] | None = None


def _page_of_plan(found: Plan, title: str | None) -> Page:
    return plan_page(found, title or f"{found.graph.name} on {found.device.name}, policy {found.schedule.policy}")


def _page_of_solution(found: Solution, title: str | None) -> Page:
    if found.trace is None:
        raise RequestError("the blocks of this solution are not known to it; solve a Trace, as overspill.pack does")
    return pack_page(found, found.trace, title or f"{len(found.trace.blocks)} blocks")


SHOWN: dict[type, Shown] = {
    Plan: Shown(_page_of_plan, plan_verdict),
    Sweep: Shown(sweep_page, sweep_verdict_of, sweep_table),
    Comparison: Shown(compare_page, compare_verdict, compare_table),
    Estimate: Shown(estimate_page, estimate_verdict, estimate_table),
    Recording: Shown(recording_page, recording_verdict, steps_table),
    Solution: Shown(_page_of_solution, pack_verdict),
}
