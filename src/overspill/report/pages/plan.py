"""A plan as a page: verdict, linked views, and the peak's parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from overspill.core import Verb
from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_apart, format_bytes, format_seconds
from overspill.plans.plan import Plan
from overspill.report.listing import count, percent
from overspill.report.page import Column, Figure, Page, Section, Table, Unit, Verdict, step
from overspill.report.plan import figures_table, peak_of, peak_table, step_notes, too_small


def plan_page(plan: Plan, title: str, placer: str | None = None) -> Page:
    """The report of `plan`.

    Its blocks are where `placer` puts them (None: PyTorch's caching allocator).
    """
    notes = ("Times and memory are simulated, not measured.", *step_notes(plan))
    tables = (*_swaps(plan), peak_table(plan, peak_of(plan)), figures_table(plan))
    sections: tuple[Section, ...] = (step(plan, placer), _beside(plan), *tables)
    return Page(title, plan_verdict(plan), sections, notes)


def _beside(plan: Plan) -> Table:
    """A table of the plan and the unmanaged step, side by side."""
    rows = [("live tensors at the peak", format_bytes(plan.peak_bytes), format_bytes(plan.unmanaged_peak_bytes))]
    if plan.device_bytes is not None:
        rows.insert(0, ("card", format_bytes(plan.needed_bytes), format_bytes(plan.unmanaged_bytes)))
    nothing = format_bytes(0)
    rows += [
        ("step", format_seconds(plan.step_seconds), format_seconds(plan.in_core_seconds)),
        ("waiting", format_seconds(plan.timeline.exposed_transfer_seconds), format_seconds(plan.unmanaged_timeline.exposed_transfer_seconds)),
        ("recomputing", format_seconds(plan.recomputing_seconds), format_seconds(0.0)),
        ("to the store and back", f"{format_bytes(plan.offloaded_bytes)} and {format_bytes(plan.prefetched_bytes)}", nothing),
    ]  # fmt: skip
    columns = (Column("of a step"), Column(f"plan ({plan.schedule.policy})"), Column("unmanaged"))
    return Table("Managed and unmanaged", columns, tuple(rows))


def _swaps(plan: Plan) -> tuple[Table, ...]:
    """Offloaded tensors: when they leave and return, and the waits. No table where nothing is offloaded."""
    graph, waited = plan.graph, defaultdict[str, float](float)
    for cause, seconds in plan.timeline.wait_seconds.items():
        waited[cause.partition(" of ")[2]] += seconds
    # When each tensor first leaves and comes back.
    starts: dict[Verb, dict[int, float]] = {Verb.OFFLOAD: {}, Verb.PREFETCH: {}}
    for event in plan.timeline.events:
        if event.verb in starts:
            starts[event.verb].setdefault(event.target, event.start_seconds)
    gone, back = starts.values()
    rows = [
        (tensor.name, tensor.nbytes, graph.source(graph.producer.get(tensor.id)), gone.get(tensor.id), back.get(tensor.id), waited[tensor.name])
        for tensor in (graph.tensors[t] for t in {**gone, **back})
    ]  # fmt: skip
    if not rows:
        return ()
    columns = (
        Column("tensor"), Column("bytes", Unit.BYTES, bar=True), Column("line"), Column("leaves at", Unit.SECONDS),
        Column("comes back from", Unit.SECONDS), Column("compute waits", Unit.SECONDS),
    )  # fmt: skip
    # Longest waits first.
    ranked = sorted(rows, key=lambda row: (-row[5], -row[1]))
    return (Table("What leaves the device, the longest waits first", columns, tuple(ranked)),)


def infeasible_page(error: InfeasibleBudget, title: str, spelled: Callable[[str], str] = str) -> Page:
    """The report where there is no plan.

    It has the least that one needs, what that is made of, and what would help. `spelled` writes the names of settings
    as whoever asked gives them.
    """
    budget, floor = format_apart(error.budget_bytes, error.floor_bytes)
    figures = [Figure("the least that works", floor, error.cause)]
    figures += [Figure(part.what, format_bytes(part.nbytes)) for part in error.parts]
    changes = [(spelled(change.what), change.nbytes) for change in error.changes]
    changes.append(("a card of that size" if error.parts else "a budget of that size", error.floor_bytes))
    ranked = tuple(sorted(changes, key=lambda change: change[1]))
    helps = Table(
        "What would help, the least first",
        (Column("change"), Column("needs then", Unit.BYTES, bar=True)),
        ranked,
        "A smaller batch takes less in any case.",
    )
    verdict = Verdict(f"Does not fit in {budget}", good=False, figures=tuple(figures))
    return Page(title, verdict, (helps,), tuple(f"{hint[0].upper()}{hint[1:]}." for hint in map(spelled, error.hints)))


def plan_verdict(plan: Plan) -> Verdict:
    """The plan's memory and its cost."""
    of = "" if plan.device_bytes is None else "of the card, "
    return Verdict(
        f"Fits in {format_bytes(plan.asked_bytes)}" if plan.fits_device else too_small(plan),
        good=plan.fits_device,
        figures=(
            Figure("it takes", format_bytes(plan.needed_bytes), f"{of}{percent(plan.needed_bytes, plan.asked_bytes)} of the budget"),
            Figure("unmanaged", format_bytes(plan.unmanaged_bytes), f"the plan takes {percent(plan.needed_bytes, plan.unmanaged_bytes)} of it"),
            Figure("simulated slowdown", f"{plan.slowdown:.3f}", f"{format_seconds(plan.step_seconds)}, {format_seconds(plan.in_core_seconds)} unmanaged"),
            Figure("offloaded each step", format_bytes(plan.offloaded_bytes), count(plan.schedule.counts[Verb.OFFLOAD], "tensor")),
            Figure("recomputed each step", count(plan.recomputed_ops, "op"), format_seconds(plan.recomputing_seconds) if plan.recomputed_ops else ""),
        ),
    )  # fmt: skip
