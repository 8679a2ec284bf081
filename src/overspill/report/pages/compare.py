"""A comparison of policies as a page.

It plots memory against time with the bound, and has the table of all figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overspill.core.units import format_apart, format_bytes, format_seconds
from overspill.plans.comparison import BASELINE, Comparison, Row
from overspill.report.compare import COLUMNS, explanation, figures_table, remarks, row_figures
from overspill.report.listing import percent
from overspill.report.page import Axis, Column, Curve, Figure, Mark, Page, Point, Points, Table, Unit, Verdict
from overspill.report.tables import Cell

TIME = Axis("simulated step", Unit.SECONDS)
EXPLAINED = (
    "Average is what is live over the time of the step, in the mean. Overlap is the time in which ops ran while something was "
    "moved; exposed is the time in which ops waited, for what was moved or for the host."
)
SHORT = (
    Column("policy"),
    Column("fits"),
    Column("memory", Unit.BYTES, bar=True),
    COLUMNS["step_seconds"],
    COLUMNS["slowdown"],
)


def compare_page(compared: Comparison, title: str | None = None) -> Page:
    """The report of `compared`."""
    name = title or f"policies within {format_bytes(compared.budget_bytes)} on {compared.device.name}"
    rows = [_figures(row, compared) for row in compared]
    explained = explanation(rows, compared.device, compared.budget_bytes, compared.lower_bound_seconds)
    notes = explained + remarks(rows, compared.device)
    if any(row["average_bytes"] is not None for row in rows):
        notes.append(EXPLAINED)
    return Page(name, compare_verdict(compared), (_points(compared), figures_table(rows)), tuple(notes))


def _figures(row: Row, compared: Comparison) -> dict[str, Any]:
    """A row of the table of all figures."""
    figures = row_figures(row, compared.device)
    least = row.least_bytes
    over = None if row.fits or least is None or least <= compared.budget_bytes else least - compared.budget_bytes
    return figures | {"over_bytes": over}


def compare_verdict(compared: Comparison) -> Verdict:
    """The fastest policy that fits, or the least memory that would do."""
    budget = format_bytes(compared.budget_bytes)
    fitting = [row for row in compared if row.fits and row.plan is not None]
    if not fitting or fitting[0].plan is None:
        # No policy fits: name the least that would do.
        least = min((row.least_bytes for row in compared if row.least_bytes is not None), default=None)
        if least is None:
            return Verdict(f"No policy fits {budget}", good=False)
        budget, needs = format_apart(compared.budget_bytes, least)
        return Verdict(f"No policy fits {budget}; {needs} would do", good=False)
    best, plan = fitting[0], fitting[0].plan
    # The fastest, and how far it is from the bound.
    figures = [
        Figure("policies that fit", f"{len(fitting)} of {len(compared)}"),
        Figure("card" if plan.device_bytes else "memory", format_bytes(plan.needed_bytes), f"of {budget}"),
        Figure("simulated step", format_seconds(plan.step_seconds), f"{best.slowdown:.3f} of {BASELINE}'s"),
        Figure("offloaded each step", format_bytes(plan.offloaded_bytes)),
    ]
    if compared.lower_bound_seconds:
        above = plan.step_seconds / compared.lower_bound_seconds - 1
        figures.append(
            Figure(
                "proven lower bound",
                format_seconds(compared.lower_bound_seconds),
                f"the plan is {percent(above, 1)} above it",
            )
        )
    return Verdict(f"{best.policy} is the fastest within {budget}", good=True, figures=tuple(figures))


def compare_table(compared: Comparison) -> Table:
    """A short table of the policies."""
    return Table("Policies", SHORT, tuple(map(_short, compared)))


def _short(row: Row) -> tuple[Cell, ...]:
    if row.plan is None:
        return row.policy, row.fits, None, None, None
    return row.policy, row.fits, row.plan.needed_bytes, row.plan.step_seconds, row.slowdown


def _points(compared: Comparison) -> Points:
    planned = [(row, row.plan) for row in compared if row.plan is not None]
    points = tuple(
        Point(row.policy, plan.needed_bytes, plan.step_seconds, row.fits, _note(row)) for row, plan in planned
    )
    budget, of_card = compared.budget_bytes, any(plan.device_bytes for _, plan in planned)
    most = max((plan.needed_bytes for _, plan in planned), default=budget)
    marks = (Mark("budget", budget, on_x=True),) if budget <= 2 * most else ()
    bounds = compared.bounds()
    curves = (bound_curve(dict(bounds)),) if bounds else ()
    memory = Axis("card" if of_card else "memory", Unit.BYTES)
    return Points("Memory against time", memory, TIME, points, curves, marks, "Left is less memory, down is faster.")


def bound_curve(bounds: Mapping[int, float]) -> Curve:
    """The curve of seconds that no plan beats, by budget.

    What is proven for one budget holds for all that are smaller, down to the next.
    """
    budgets = sorted(bounds, reverse=True)
    return Curve("proven lower bound", budgets, [bounds[budget] for budget in budgets], steps=True, dashed=True)


def _note(row: Row) -> str:
    """The tooltip of a policy."""
    waits = "" if row.stall_cause is None else f"; waits longest for {row.stall_cause}"
    return f"slowdown {row.slowdown:.3f}{waits}"
