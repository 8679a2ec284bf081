"""A measured run as a Perfetto trace, next to the simulation of its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overspill.core import COPIES, Stream, Verb
from overspill.plans.plan import Plan
from overspill.runtime.recording.record import Label, Measured, RunRecord

from .plan_trace import HOST, LIVE, op_facts, planned_step, tensor_facts
from .trace_events import BAD, Process, write_trace_events

MEASURED = 3
"""The number of the process. Plans after the first have higher numbers."""
STEPS = "steps"
LANES = {Verb.OFFLOAD: Stream.OFFLOAD, Verb.PREFETCH: Stream.PREFETCH}


def write_run_trace(record: RunRecord, plans: Sequence[Plan], path: str | Path, title: str) -> None:
    """Write a run and its plans' simulated steps to `path`.

    Each is a process of the trace. Raises RequestError if that fails.
    """
    facts = {
        "what": "the process `measured` is measured by overspill, those that are `simulated` are not",
        "title": title,
    }
    names = [title if len(plans) == 1 else f"{title}, plan {number}" for number in range(1, len(plans) + 1)]
    simulated = [
        planned_step(plan, name, *([] if place == 0 else [MEASURED + place]))
        for place, (plan, name) in enumerate(zip(plans, names, strict=True))
    ]
    first, others = simulated[:1], simulated[1:]
    write_trace_events(path, (*first, _TracedRun(record, title).process(), *others), facts)


class _TracedRun:
    def __init__(self, record: RunRecord, title: str) -> None:
        self._record = record
        on_host = [Stream.HOST_UPDATE] if record.updates else []
        threads = (STEPS, Stream.COMPUTE, *COPIES, *on_host, *([HOST] if record.host else []))
        self._process = Process(MEASURED, f"measured: {title}", threads)

    def process(self) -> Process:
        """Return the process with all events of the run."""
        for number, (step, facts) in enumerate(zip(self._record.steps, self._record.facts, strict=True), 1):
            name = f"step {number}" + ", with planning and compiling" * facts.plans + ", in part" * (not facts.is_whole)
            made_ready = {"made_ready_to_tell_seconds": facts.prepared_seconds} if facts.prepared_seconds else None
            self._slice(STEPS, name, step, "step", made_ready)
        # Compute, copies, and the host that issues them.
        for done in self._record.compute:
            self._computed(done)
        for verb, copies in self._record.copies.items():
            for copy in copies:
                name = "a move between steps" if copy.label is None else copy.label.name
                self._slice(LANES[verb], name, copy, verb, _facts(copy.label))
        for update in self._record.updates:
            if update.label is not None:
                of = update.label
                self._slice(Stream.HOST_UPDATE, of.name, update, Verb.RUN_ON_HOST, _facts(of))
        for issued in self._record.host:
            assert issued.label is not None
            self._slice(HOST, f"issue {issued.label.verb} of {issued.label.name}", issued, "issue")
        # Arrows and the counter of live bytes.
        self._flows()
        for change, live in self._record.live_bytes():
            self._process.count(LIVE, change.seconds, live)
        return self._process

    def _computed(self, done: Measured) -> None:
        label = done.label
        assert label is not None
        if label.is_op:
            self._slice(Stream.COMPUTE, label.name, done, str(label.verb), _facts(label))
        elif done.is_wait:
            facts = {"cause": label.cause, **_facts(label)}
            self._slice(Stream.COMPUTE, f"waits: {label.cause}", done, "stall", facts, BAD)

    def _flows(self) -> None:
        """Add arrows from each tensor's offload to its next prefetch."""
        both = [(copy, verb) for verb, copies in self._record.copies.items() for copy in copies]
        left: dict[tuple[int, int], Measured] = {}
        for number, (copy, verb) in enumerate(sorted(both, key=lambda pair: pair[0].begin_seconds)):
            if copy.label is None:
                continue
            key = id(copy.label.graph), copy.label.target
            if verb is Verb.OFFLOAD:
                left[key] = copy
            elif (source := left.get(key)) is not None:
                ends = (Stream.OFFLOAD, source.begin_seconds), (Stream.PREFETCH, copy.begin_seconds)
                self._process.flow(number, "comes back", *ends)

    def _slice(
        self,
        thread: str,
        name: str,
        done: Measured,
        category: str,
        args: Mapping[str, Any] | None = None,
        colour: str | None = None,
    ) -> None:
        begin, end = done.begin_seconds, done.end_seconds
        self._process.slice(thread, name, begin, end, category=category, args=args, colour=colour)


def _facts(label: Label | None) -> dict[str, Any]:
    if label is None:
        return {}
    if label.is_op or label.verb is Verb.RUN_ON_HOST:
        return op_facts(label.graph, label.graph.ops[label.target])
    return tensor_facts(label.graph, label.target)
