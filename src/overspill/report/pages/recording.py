"""A recording as a page: its steps, and views of the last.

All of it is measured.
"""

from __future__ import annotations

from dataclasses import replace

from overspill.core.units import format_bytes, format_seconds
from overspill.report.listing import count
from overspill.report.page import (
    Column,
    Figure,
    Mark,
    Page,
    Section,
    Step,
    Table,
    Unit,
    Verdict,
    is_of,
    last_step,
    measured_step,
    step,
    with_measured,
)
from overspill.report.recording import Recording
from overspill.runtime.recording.record import RunRecord

SEEN = (
    "Memory is of what planned ops make and are given, and of gradients and optimizer state; not of what an op takes and gives "
    "back inside itself, nor of what the loop makes besides."
)
ON_CUDA = "On CUDA a storage comes and goes with the op during which the host took or dropped it, on the clock of the compute stream."


def recording_page(found: Recording, title: str | None = None) -> Page:
    """The report of a recording."""
    sections: tuple[Section, ...] = (_views(found), steps_table(found))
    notes = ("Recorded steps take a little longer than others.", SEEN, *([ON_CUDA] if found.record.on_device else []))
    return Page(title or found.title, recording_verdict(found), sections, notes)


def recording_verdict(found: Recording) -> Verdict:
    """The usual step time, with memory and waits."""
    record = found.record
    planned = max((plan.peak_bytes for plan in found.plans), default=0)
    steps = len(record.steps)
    moved = sum(found.offloaded_bytes + found.prefetched_bytes) / steps
    waited = sum(found.waited_seconds) / steps
    figures = (
        Figure("usual step", format_seconds(found.usual_step_seconds), "measured, the median of those in which nothing was planned"),
        Figure("live bytes", format_bytes(found.peak_bytes), "measured, the most at once"),
        Figure("planned peak", format_bytes(planned), "of live bytes"),
        Figure("moved each step", format_bytes(round(moved)), "measured, both ways"),
        Figure("waiting for transfers", format_seconds(waited), "measured, in each step"),
    )  # fmt: skip
    return Verdict(f"{count(steps, 'step')} recorded", None, figures)


def steps_table(found: Recording) -> Table:
    """A table of the measured figures of each step."""
    record = found.record
    # What is unusual about a step.
    notes = [
        "; ".join(
            note
            for note, holds in (
                ("with planning and compiling", facts.plans),
                (f"{format_seconds(facts.prepared_seconds)} to make it tell", facts.prepared_seconds > 0),
                ("in part", not facts.is_whole),
            )
            if holds
        )
        for facts in record.facts
    ]
    columns = (
        Column("step", Unit.NUMBER),
        Column("took", Unit.SECONDS, bar=True),
        Column("waited for transfers", Unit.SECONDS),
        Column("offloaded", Unit.BYTES),
        Column("prefetched", Unit.BYTES),
        Column("most live bytes", Unit.BYTES),
        Column(""),
    )
    rows = zip(
        range(1, len(record.steps) + 1),
        found.step_seconds,
        found.waited_seconds,
        found.offloaded_bytes,
        found.prefetched_bytes,
        (record.peak_bytes(at) for at in range(len(record.steps))),
        notes,
        strict=True,
    )
    return Table("Each step, measured", columns, tuple(rows))


def views_title(record: RunRecord) -> str:
    """The title of the measured views: which step they show."""
    return f"Step {last_step(record) + 1} as it was measured"


def _views(found: Recording) -> Step:
    """The views of the last step, measured and planned. What was planned is there where one plan is all of it."""
    record, title = found.record, views_title(found.record)
    plan = next((plan for plan in found.plans if is_of(record, plan.graph)), None)
    if plan is None:
        return measured_step(record, title)
    both = with_measured(step(plan, title=title), record, [plan.graph])
    *simulated, measured = both.runs
    marks = (Mark("budget", plan.budget_bytes),)
    return replace(both, runs=(measured, *simulated), marks=marks)
