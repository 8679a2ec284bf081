"""The result of `overspill.record`: a few steps of a real run, as files and a page. All of it is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

from overspill.core import Verb
from overspill.core.errors import RequestError
from overspill.core.reportable import Reportable
from overspill.core.units import format_bytes, format_seconds
from overspill.plans.plan import Plan
from overspill.runtime.recording.record import RunRecord

from .listing import count
from .page import Column, Figure, Mark, Page, Step, Table, Unit, Verdict
from .page.measured import is_of, last_step, measured_step, with_measured
from .page.step import step
from .tracing import write_run_snapshot, write_run_trace

SEEN = (
    "Memory is of what planned ops make and are given, and of gradients and optimizer state; not of what an op takes "
    "and gives "
    "back inside itself, nor of what the loop makes besides."
)
ON_CUDA = (
    "On CUDA a storage comes and goes with the op during which the host took or dropped it, on the clock of the "
    "compute stream."
)


class Recording(Reportable):
    """A few measured steps of a real run.

    Its results are available once its context has ended. A step is a call of a train step, or ends with the `step()` of
    an optimizer. Times are seconds.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._record: RunRecord | None = None

    def take(self, record: RunRecord) -> None:
        """Set the record, once recording has ended."""
        self._record = record

    @property
    def record(self) -> RunRecord:
        """The record of the run. Raises RequestError while it is under way, or where nothing was recorded."""
        if self._record is None:
            raise RequestError("the recording is under way; ask for its results behind the `with` that it lasts for")
        if not self._record.steps:
            raise RequestError("nothing was recorded: no planned step ran while the recording lasted")
        return self._record

    @property
    def plans(self) -> list[Plan]:
        """The plans that ran."""
        return self.record.plans

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step, the cost of recording included."""
        return [step.seconds for step in self.record.steps]

    @property
    def usual_step_seconds(self) -> float:
        """The median step time, in seconds.

        It covers the steps without planning, compiling or preparation of the recording; if none remains, all steps.
        """
        usual = [
            step.seconds
            for step, facts in zip(self.record.steps, self.record.facts, strict=True)
            if facts.is_whole and not facts.plans and not facts.prepared_seconds
        ]
        return median(usual or self.step_seconds)

    @property
    def waited_seconds(self) -> list[float]:
        """Seconds that compute waited for transfers, by step."""
        waits = [thing for thing in self.record.compute if thing.is_wait]
        return [sum(w.seconds for w in self.record.within(waits, step)) for step in range(len(self.record.steps))]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of storages that were live at once."""
        return self.record.peak_bytes()

    @property
    def offloaded_bytes(self) -> list[int]:
        """Bytes that went to the store, by step, of tensors that ops made."""
        return self._moved(Verb.OFFLOAD)

    @property
    def prefetched_bytes(self) -> list[int]:
        """Bytes that came back from the store, by step."""
        return self._moved(Verb.PREFETCH)

    def trace(self, path: str | Path) -> None:
        """Write a Perfetto trace of the run to `path`, next to the plans' simulated steps.

        Raises RequestError if the file cannot be written or nothing was recorded.
        """
        write_run_trace(self.record, self.plans, path, self.title)

    def snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot to `path`, for PyTorch's memory_viz.

        On CUDA it is PyTorch's own. Raises RequestError if the file cannot be written or nothing was recorded.
        """
        write_run_snapshot(self.record, path)

    def _moved(self, verb: Verb) -> list[int]:
        record = self.record
        labels = [[c.label for c in record.within(record.copies[verb], at)] for at in range(len(record.steps))]
        return [sum(lb.graph.tensors[lb.target].nbytes for lb in of_step if lb is not None) for of_step in labels]


def recording_page(found: Recording, title: str | None = None) -> Page:
    """Return the report of a recording."""
    notes = ("Recorded steps take a little longer than others.", SEEN, *([ON_CUDA] if found.record.on_device else []))
    return Page(title or found.title, recording_verdict(found), (lambda: (_views(found),), steps_table(found)), notes)


def recording_verdict(found: Recording) -> Verdict:
    """Return the usual step time, with memory and waits."""
    record = found.record
    planned = max((plan.peak_bytes for plan in found.plans), default=0)
    steps = len(record.steps)
    moved = sum(found.offloaded_bytes + found.prefetched_bytes) / steps
    waited = sum(found.waited_seconds) / steps
    figures = (
        Figure("usual step", format_seconds(found.usual_step_seconds),
            "measured, the median of those in which nothing was planned"),
        Figure("live bytes", format_bytes(found.peak_bytes), "measured, the most at once"),
        Figure("planned peak", format_bytes(planned), "of live bytes"),
        Figure("moved each step", format_bytes(round(moved)), "measured, both ways"),
        Figure("waiting for transfers", format_seconds(waited), "measured, in each step"),
    )  # fmt: skip
    return Verdict(f"{count(steps, 'step')} recorded", None, figures)


def steps_table(found: Recording) -> Table:
    """Return a table of the measured figures of each step."""
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
    """Return the title of the measured views, which names their step."""
    return f"Step {last_step(record) + 1} as it was measured"


def _views(found: Recording) -> Step:
    """Return the views of the last step, measured and, if one plan is all of it, planned."""
    record, title = found.record, views_title(found.record)
    plan = next((plan for plan in found.plans if is_of(record, plan.graph)), None)
    if plan is None:
        return measured_step(record, title)
    both = with_measured(step(plan, title=title), record, [plan.graph])
    *simulated, measured = both.runs
    marks = (Mark("budget", plan.budget_bytes),)
    return replace(both, runs=(measured, *simulated), marks=marks)
