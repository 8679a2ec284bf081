"""The page and the short form of each kind of result. For `core/reportable.py`."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path

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
    return short_html(*short_of(found))


def in_terminal(found: Reportable) -> str:
    """A result in short, as text."""
    verdict, _ = short_of(found)
    figures = (f"{f.label}: {f.value}" + (f" ({f.note})" if f.note else "") for f in verdict.figures)
    return "\n  ".join((verdict.text, *figures))


@singledispatch
def page_of(found: Reportable, title: str | None = None) -> Page:
    """The page of a result, with this title or a default one."""
    raise TypeError(f"no page shows {title or 'a result'} of type {type(found).__name__}")


@singledispatch
def short_of(found: Reportable) -> tuple[Verdict, Table | None]:
    """The verdict of a result, and its main table."""
    raise TypeError(f"nothing shows a {type(found).__name__} in short")


@page_of.register
def _(found: Plan, title: str | None = None) -> Page:
    return plan_page(found, title or f"{found.graph.name} on {found.device.name}, policy {found.schedule.policy}")


@short_of.register
def _(found: Plan) -> tuple[Verdict, Table | None]:
    return plan_verdict(found), None


@page_of.register
def _(found: Sweep, title: str | None = None) -> Page:
    return sweep_page(found, title)


@short_of.register
def _(found: Sweep) -> tuple[Verdict, Table | None]:
    return sweep_verdict_of(found), sweep_table(found)


@page_of.register
def _(found: Comparison, title: str | None = None) -> Page:
    return compare_page(found, title)


@short_of.register
def _(found: Comparison) -> tuple[Verdict, Table | None]:
    return compare_verdict(found), compare_table(found)


@page_of.register
def _(found: Estimate, title: str | None = None) -> Page:
    return estimate_page(found, title)


@short_of.register
def _(found: Estimate) -> tuple[Verdict, Table | None]:
    return estimate_verdict(found), estimate_table(found)


@page_of.register
def _(found: Recording, title: str | None = None) -> Page:
    return recording_page(found, title)


@short_of.register
def _(found: Recording) -> tuple[Verdict, Table | None]:
    return recording_verdict(found), steps_table(found)


@page_of.register
def _(found: Solution, title: str | None = None) -> Page:
    if found.trace is None:
        raise RequestError("the blocks of this solution are not known to it; solve a Trace, as overspill.pack does")
    return pack_page(found, found.trace, title or f"{len(found.trace.blocks)} blocks")


@short_of.register
def _(found: Solution) -> tuple[Verdict, Table | None]:
    return pack_verdict(found), None
