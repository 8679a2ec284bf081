"""A plan as a Perfetto trace, next to the unmanaged step.

It shows the simulated work of each stream over time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from overspill.core import OF_OPS, Event, Graph, Op, Schedule, Stream, TensorKind, Timeline
from overspill.core.units import format_bytes
from overspill.plans.plan import Plan
from overspill.policies.in_core import Liveness
from overspill.simulate.host import issues_of

from .changes import changes_of, present_first
from .trace_events import BAD, Process, write_trace_events

PLANNED, UNMANAGED = 1, 2
"""The numbers of the two processes."""
LAYERS, HOST = "layers", "host"
LIVE = "live bytes"
"""The counter of all bytes on the device; `live bytes: KIND` are those of a kind."""


def write_plan_trace(plan: Plan, path: str | Path, title: str = "") -> None:
    """Write a trace of `plan` and the unmanaged step to `path`.

    Both are simulated. Raises RequestError if that fails.
    """
    policy, name = plan.schedule.policy, title or plan.graph.name
    planned = planned_step(plan, name)
    plain = Liveness().plan(plan.graph, plan.device)
    unmanaged = _TracedStep(plan, plain, plan.unmanaged_timeline, UNMANAGED, f"simulated, unmanaged: {plan.graph.name}")
    facts = {
        "what": "simulated by overspill, not measured",
        "device": plan.device.name,
        "policy": policy,
        "budget_bytes": plan.asked_bytes,
        "peak_bytes": plan.peak_bytes,
        "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
    }
    write_trace_events(path, (planned, unmanaged.process()), facts)


def planned_step(plan: Plan, name: str, pid: int = PLANNED) -> Process:
    """Return the simulated step of `plan`, as process `pid` of a trace."""
    return _TracedStep(plan, plan.schedule, plan.timeline, pid, f"simulated: {name}").process()


class _TracedStep:
    """One simulated step, as a process of the trace."""

    def __init__(self, plan: Plan, schedule: Schedule, timeline: Timeline, pid: int, name: str) -> None:
        self.graph, self.device, self.schedule, self.timeline = plan.graph, plan.device, schedule, timeline
        self._process = Process(pid, name, (LAYERS, *timeline.streams, HOST))

    def process(self) -> Process:
        """Return the process with all events of the step."""
        for event in self.timeline.events:
            self._event(event)
        self._layers()
        self._stalls()
        self._flows()
        self._host()
        for at, kinds, total in memory_of(self.graph, self.schedule, self.timeline):
            self._process.count(LIVE, at, total)
            for kind, nbytes in kinds.items():
                self._process.count(f"{LIVE}: {kind}", at, nbytes)
        return self._process

    def _event(self, event: Event) -> None:
        if event.verb in OF_OPS:
            op = self.graph.ops[event.target]
            algorithm = self.schedule.instructions[event.instruction].algorithm
            name, args = op.name, op_facts(self.graph, op, algorithm)
        else:
            name, args = self.graph.tensors[event.target].name, tensor_facts(self.graph, event.target)
        self._process.slice(
            event.stream, name, event.start_seconds, event.end_seconds, category=event.verb, args=args
        )  # fmt: skip

    def _layers(self) -> None:
        """Add slices for the phases, and within them for the layers, from their first op to their last."""
        computed = [e for e in self.timeline.events if e.stream is Stream.COMPUTE]
        ops = self.graph.ops
        for phase, in_phase in groupby(computed, key=lambda event: ops[event.target].phase):
            inside = list(in_phase)
            self._process.slice(
                LAYERS, phase, inside[0].start_seconds, inside[-1].end_seconds, category="phase"
            )  # fmt: skip
            for layer, of_layer in groupby(inside, key=lambda event: ops[event.target].layer):
                run = list(of_layer)
                self._process.slice(
                    LAYERS, layer or "(outside layers)", run[0].start_seconds, run[-1].end_seconds, category="layer"
                )  # fmt: skip

    def _stalls(self) -> None:
        for stall in self.timeline.stalls:
            instruction = self.schedule.instructions[stall.instruction]
            args: dict[str, Any] = {"cause": stall.cause, "seconds": stall.end_seconds - stall.start_seconds}
            if instruction.verb not in OF_OPS:
                args |= tensor_facts(self.graph, instruction.target)
            self._process.slice(
                Stream.COMPUTE, f"waits: {stall.cause}", stall.start_seconds, stall.end_seconds,
                category="stall", args=args, colour=BAD,
            )  # fmt: skip

    def _flows(self) -> None:
        """Add an arrow from each tensor's offload to its return."""
        left: dict[int, Event] = {}
        for number, event in enumerate(self.timeline.events):
            if event.stream is Stream.OFFLOAD:
                left[event.target] = event
            elif event.stream is Stream.PREFETCH and event.target in left:
                begin = left[event.target].start_seconds
                self._process.flow(
                    number, "comes back", (Stream.OFFLOAD, begin), (Stream.PREFETCH, event.start_seconds)
                )  # fmt: skip

    def _host(self) -> None:
        for issue in issues_of(self.schedule, self.device, self.timeline):
            instruction = self.schedule.instructions[issue.instruction]
            of_op = instruction.verb in OF_OPS
            what = (self.graph.ops if of_op else self.graph.tensors)[instruction.target].name
            self._process.slice(
                HOST, f"issue {instruction.verb} of {what}", issue.start_seconds, issue.end_seconds, category="issue"
            )  # fmt: skip


def memory_of(graph: Graph, schedule: Schedule, timeline: Timeline) -> Iterator[tuple[float, Counter[TensorKind], int]]:
    """Yield live bytes over time: `(seconds, bytes by kind, all bytes)`.

    Each change has a row, in order. Bytes of no tensor count as workspace. All bytes are first the timeline's while the
    instruction runs, and then the bytes that stay. The counter is the same object in each row.
    """
    tensors = graph.tensors
    kinds = Counter[TensorKind]()
    for tensor in present_first(graph, schedule):
        kinds[tensors[tensor].kind] += tensors[tensor].nbytes
    live = kinds.total()
    yield 0.0, kinds, live
    starts = {event.instruction: event.start_seconds for event in timeline.events if event.stream is Stream.COMPUTE}
    now = 0.0
    # Before and after each instruction.
    for index, appearing, scratch_bytes, leaving in changes_of(graph, schedule, timeline):
        for tensor in appearing:
            kinds[tensors[tensor].kind] += tensors[tensor].nbytes
            live += tensors[tensor].nbytes
        kinds[TensorKind.WORKSPACE] += scratch_bytes
        yield starts.get(index, now), kinds, live + scratch_bytes
        kinds[TensorKind.WORKSPACE] -= scratch_bytes
        for tensor in leaving:
            kinds[tensors[tensor].kind] -= tensors[tensor].nbytes
            live -= tensors[tensor].nbytes
        now = timeline.clock_seconds[index]
        yield now, kinds, live


def op_facts(graph: Graph, op: Op, algorithm: int = 0) -> dict[str, Any]:
    """Return facts about an op, as arguments of its slice."""
    facts = {
        "layer": op.layer,
        "layer_type": op.layer_type,
        "phase": op.phase,
        "read_bytes": sum(graph.tensors[t].nbytes for t in set(op.reads)),
        "written_bytes": sum(graph.tensors[t].nbytes for t in set(op.writes)),
        "workspace_bytes": op.workspace_of(algorithm),
        "flops": op.flops,
    }
    if op.algorithms:
        facts["algorithm"] = op.algorithms[algorithm].name
    return facts | _lines(graph, op.id)


def tensor_facts(graph: Graph, tensor: int) -> dict[str, Any]:
    """Return facts about a moved tensor, as arguments of its slice."""
    made = graph.tensors[tensor]
    facts = {"tensor": made.name, "kind": made.kind, "shape": "x".join(map(str, made.shape)), "dtype": made.dtype}
    producer = graph.producer.get(tensor)
    if producer is not None:
        facts |= {"made_by": graph.ops[producer].name, "layer": graph.ops[producer].layer}
    return {**facts, "bytes": made.nbytes, "size": format_bytes(made.nbytes), **_lines(graph, producer)}


def _lines(graph: Graph, op: int | None) -> dict[str, Any]:
    """Return the source line and stack of an op, the outermost line first, or an empty dict."""
    stacks = graph.stacks(op)
    if not stacks:
        return {}
    return {"source": graph.source(op), "stack": [f"{f.file}:{f.line} {f.function}" for f in stacks[0]]}
