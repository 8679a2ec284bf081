"""A run on the CPU as a trace for Perfetto: what its threads did when, as it was measured, beside the plan's simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.core import Stream, Verb
from overspill.plans.plan import Plan
from overspill.runtime.record import Measured, RunRecord

from .plan_trace import LIVE, op_facts, planned_step, tensor_facts
from .trace_events import BAD, Process, write_trace_events

MEASURED = 3
"""The number of the process."""
STEPS = "steps"
LANES = {Verb.OFFLOAD: Stream.OFFLOAD, Verb.PREFETCH: Stream.PREFETCH}
SHORTEST_WAIT_SECONDS = 20e-6
"""An await that takes less found its transfer done."""


def write_run_trace(record: RunRecord, plan: Plan, path: str | Path, title: str) -> None:
    """Write a run and the simulated step of its `plan` to `path`, each a process. Raises RequestError where that fails."""
    facts = {"what": "the process `measured` is measured by overspill, the process `simulated` is not", "title": title}
    write_trace_events(path, (planned_step(plan, title), _Run(record, title).process()), facts)


class _Run:
    def __init__(self, record: RunRecord, title: str) -> None:
        self._record = record
        self._process = Process(MEASURED, f"measured: {title}", (STEPS, *Stream))

    def process(self) -> Process:
        """All that the trace has of the run."""
        for number, step in enumerate(self._record.steps, 1):
            name = f"step {number}" + (", with planning and compiling" if number == 1 else "")
            self._slice(STEPS, name, step, "step")
        for done in self._record.compute:
            self._computed(done)
        for verb, copies in self._record.copies.items():
            for copy in copies:
                self._slice(LANES[verb], _name(copy), copy, verb, _facts(copy))
        self._flows()
        live = 0
        for change in self._record.changes_in_steps():
            live += change.nbytes
            self._process.count(LIVE, change.seconds, live)
        return self._process

    def _computed(self, done: Measured) -> None:
        assert done.label is not None
        verb = done.label.verb
        if verb in (Verb.RUN, Verb.RECOMPUTE):
            self._slice(Stream.COMPUTE, _name(done), done, verb, _facts(done))
        elif done.end_seconds - done.begin_seconds >= SHORTEST_WAIT_SECONDS:
            stream = Stream.OFFLOAD if verb is Verb.AWAIT_OFFLOAD else Stream.PREFETCH
            cause = f"{stream} of {_name(done)}"
            self._slice(Stream.COMPUTE, f"waits: {cause}", done, "stall", {"cause": cause, **_facts(done)}, BAD)

    def _flows(self) -> None:
        """An arrow from where a tensor leaves to where it comes back next."""
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


def _name(done: Measured) -> str:
    """The op that ran, or the tensor that moved."""
    if done.label is None:
        return "a move between steps"
    graph, verb, target = done.label
    return (graph.ops if verb in (Verb.RUN, Verb.RECOMPUTE) else graph.tensors)[target].name


def _facts(done: Measured) -> dict[str, Any]:
    if done.label is None:
        return {}
    graph, verb, target = done.label
    if verb in (Verb.RUN, Verb.RECOMPUTE):
        return op_facts(graph, graph.ops[target])
    return tensor_facts(graph, target)
