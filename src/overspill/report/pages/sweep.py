"""A budget sweep as a page: memory against time, with the bound.

And a table of every plan.
"""

from __future__ import annotations

from overspill.core.units import format_bytes
from overspill.plans.sweep import Sweep, SweepPoint
from overspill.report.page import Axis, Curve, Figure, Lines, Mark, Page, Point, Points, Unit, Verdict
from overspill.report.sweep import share_up, sweep_table, sweep_verdict

from .compare import bound_curve

MEMORY, TIME = Axis("budget", Unit.BYTES), Axis("simulated step", Unit.SECONDS)
OF_CARD = "Budgets are sizes of the card, with its context and what PyTorch's allocator takes; live is what tensors take of that."


def sweep_page(sweep: Sweep, title: str | None = None) -> Page:
    """The report of `sweep`."""
    name = title or f"{sweep.points[0].plan.graph.name if sweep.points[0].plan else 'step'} at every budget"
    notes = (
        f"Times are simulated for {sweep.device.name}, not measured. Slowdown is to the step without a budget.",
        "Below the bound lies no plan within that budget, by any policy that keeps the graph's order.",
        "A share, as the budget of a plan or a run, gives the plan of its row. A larger budget whose plan is slower is left out.",
        *(() if sweep.unmanaged_device_bytes is None else (OF_CARD,)),
        *(f"{name} works from {format_bytes(floor.nbytes)} on: {floor.cause}" for name, floor in sweep.floors.items()),
    )
    return Page(name, sweep_verdict_of(sweep), (_curves(sweep), sweep_table(sweep)), notes)


def sweep_verdict_of(sweep: Sweep) -> Verdict:
    """How far memory goes down, and whether that fits the device."""
    least = sweep.frontier[-1]
    assert least.plan is not None
    fitting = [point for point in sweep.points if sweep.fits(point)]
    unmanaged = sweep.unmanaged_bytes
    of_card = sweep.unmanaged_device_bytes is not None
    figures = [
        Figure("unmanaged", format_bytes(unmanaged), "the card that it needs" if of_card else "live bytes"),
        Figure(
            "smallest budget", format_bytes(least.budget_bytes), f"{share_up(least.budget_bytes / unmanaged)} of that"
        ),
        Figure("slowdown there", f"{least.plan.slowdown:.3f}", f"simulated, by {least.policy}"),
    ]
    # For a GPU, also the size of its memory.
    if of_card:
        figures.append(Figure(f"{sweep.device.name} has", format_bytes(sweep.device.memory_bytes)))
    text = sweep_verdict(sweep)
    return Verdict(text[0].upper() + text[1:], bool(fitting), tuple(figures))


def _curves(sweep: Sweep) -> Lines | Points:
    """A curve or point for each policy, and the bound. A policy that makes one schedule has a point."""
    found: dict[str, list[SweepPoint]] = {}
    for point in sorted(sweep.points, key=lambda point: point.budget_bytes):
        if point.plan is not None:
            found.setdefault(point.policy, []).append(point)
    # Policies with several plans are curves, above the bound.
    curves = [
        Curve(policy, [p.budget_bytes for p in own], [p.plan.step_seconds for p in own if p.plan], steps=True)
        for policy, own in found.items()
        if len(own) > 1
    ]
    curves.append(bound_curve({point.budget_bytes: point.lower_bound_seconds for point in sweep.points}))
    # Policies with one plan are points.
    single = tuple(
        Point(policy, own[0].budget_bytes, own[0].plan.step_seconds, good=sweep.fits(own[0]))
        for policy, own in found.items()
        if len(own) == 1 and own[0].plan is not None
    )
    unmanaged = sweep.unmanaged_bytes
    whole = sweep.device.usable_bytes if sweep.unmanaged_device_bytes is None else sweep.device.memory_bytes
    marks = [Mark("unmanaged", unmanaged, on_x=True)]
    if whole < unmanaged:
        marks.append(Mark(f"all of {sweep.device.name}", whole, on_x=True))
    title, note = "What less memory costs", "Left is less memory, down is faster."
    if single:
        return Points(title, MEMORY, TIME, single, tuple(curves), tuple(marks), note)
    return Lines(title, MEMORY, TIME, tuple(curves), tuple(marks), note)
