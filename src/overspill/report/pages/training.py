"""A training run as a page: measured against planned.

It has the losses, the steps, and the views of the plan.
"""

from __future__ import annotations

from overspill.core.units import format_bytes, format_seconds
from overspill.report.listing import percent
from overspill.report.page import (
    Axis,
    Curve,
    Figure,
    Lines,
    Mark,
    Page,
    Section,
    Step,
    Unit,
    Verdict,
    is_of,
    measured_step,
    with_measured,
)
from overspill.report.training import Trained, peaks_table, title_of, usual_step_seconds, usual_steps

from .plan import plan_page
from .recording import views_title


def training_page(trained: Trained, title: str | None = None) -> Page:
    """The report of a run: what was measured, then the simulated plan."""
    title = title or title_of(trained)
    planned = plan_page(trained.plan, title, trained.options.placer)
    views, measured = _views(trained, planned.sections)
    sections: tuple[Section, ...] = (peaks_table(trained), _losses(trained), _steps(trained), *views)
    notes = (
        "The peak, the losses and the times of steps were measured on this machine; the views of the step are the plan's, simulated"
        + (f", but for those that say {measured}." if measured else "."),
        *planned.notes[1:],
    )
    return Page(title, _verdict(trained), sections, notes)


def _views(trained: Trained, planned: tuple[Section, ...]) -> tuple[tuple[Section, ...], str]:
    """The views of the plan and of the measured step, and their title. The step is there where the run was recorded."""
    record, (step, *rest) = trained.managed.record, planned
    if record is None or not record.steps or not isinstance(step, Step):
        return planned, ""
    if is_of(record, trained.plan.graph):
        both = with_measured(step, record, [trained.plan.graph])
        return (both, *rest), both.runs[-1].name
    return (step, measured_step(record, views_title(record)), *rest), "measured"


def _verdict(trained: Trained) -> Verdict:
    run, plan = trained.managed, trained.plan
    good = run.measured_peak_bytes <= plan.asked_bytes and trained.identical is not False
    text = f"Trained within {format_bytes(plan.asked_bytes)}" if good else f"Trained with {format_bytes(run.measured_peak_bytes)} of a budget of {format_bytes(plan.asked_bytes)}"  # fmt: skip
    # Whether the numbers are the reference's.
    if trained.identical is not None:
        text += (
            ", with the same numbers to the last bit"
            if trained.identical
            else f", but with other numbers: {trained.difference}"
        )
    figures = (
        Figure("measured peak", format_bytes(run.measured_peak_bytes), f"{percent(run.measured_peak_bytes, plan.asked_bytes)} of the budget"),
        Figure("planned peak", format_bytes(run.planned_peak_bytes)),
        _unmanaged(trained),
        Figure("offloaded each step", format_bytes(run.offloaded_bytes), f"to the {trained.options.store} store"),
        Figure("usual step", format_seconds(usual_step_seconds(run)), f"measured, {usual_steps(run)}"),
        *_slowdown(trained),
    )  # fmt: skip
    return Verdict(text, good, figures)


def _slowdown(trained: Trained) -> list[Figure]:
    """The step time relative to a run without Overspill, if measured."""
    if trained.reference is None or not (plain := usual_step_seconds(trained.reference)):
        return []
    ratio = usual_step_seconds(trained.managed) / plain
    return [Figure("slowdown", f"{ratio:.3f}", f"measured, {format_seconds(plain)} without Overspill")]


def _unmanaged(trained: Trained) -> Figure:
    """The peak without Overspill, measured or else planned."""
    planned = format_bytes(trained.plan.unmanaged_peak_bytes)
    if trained.reference is None:
        return Figure("unmanaged peak", planned, "planned")
    whole = trained.reference.measured_peak_bytes
    share = percent(trained.managed.measured_peak_bytes, whole)
    return Figure("unmanaged peak", format_bytes(whole), f"measured, the run took {share} of it; planned {planned}")


def _losses(trained: Trained) -> Lines:
    curves = [_curve("with Overspill", trained.managed.losses)]
    if trained.reference is not None:
        curves.append(_curve("without", trained.reference.losses, dashed=True))
    return Lines("Losses", Axis("step"), Axis("loss"), tuple(curves))


def _steps(trained: Trained) -> Lines:
    curves = [_curve("with Overspill", trained.managed.step_seconds)]
    if trained.reference is not None:
        curves.append(_curve("without", trained.reference.step_seconds, dashed=True))
    note = "Measured on this machine. The first step captures, plans and compiles."
    if trained.managed.record is not None:
        note += " What each step did was recorded, which takes a little time."
    marks = (Mark("usual step", usual_step_seconds(trained.managed)),)
    return Lines("Time of each step", Axis("step"), Axis("step time", Unit.SECONDS), tuple(curves), marks, note)


def _curve(name: str, values: list[float], *, dashed: bool = False) -> Curve:
    return Curve(name, list(range(1, len(values) + 1)), values, dashed=dashed)
