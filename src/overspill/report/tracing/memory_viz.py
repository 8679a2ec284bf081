"""A plan's step or a run as a PyTorch memory snapshot.

It is for pytorch.org/memory_viz and torch.cuda._memory_viz. Allocations and frees are measured, or those of the
schedule in its order. Addresses are those that a simulation of PyTorch's caching allocator gives.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from overspill.core import OF_OPS, Graph, Schedule, TensorKind, Verb
from overspill.core.errors import RequestError
from overspill.core.files import write_whole
from overspill.estimation.peak import category
from overspill.placement.events import ALLOCATE, FREE, Events
from overspill.placement.snapshot import Origin, Span, frames_of, write_snapshot
from overspill.placement.snapshot.write import PICKLE_PROTOCOL, UNKNOWN_CATEGORY
from overspill.plans.plan import Plan
from overspill.runtime.recording.record import MemoryChange, RunRecord

from .changes import changes_of, present_first

Frame = tuple[str, int, str]
Frames = tuple[Frame, ...]
"""The frames of an Origin."""


def write_plan_snapshot(plan: Plan, path: str | Path) -> None:
    """Write a snapshot of the simulated step of `plan` to `path`. Raises RequestError if that fails."""
    step = _SnapshotStep(plan)
    write_snapshot(path, _events(step.rows), origins=step.origins, spans=step.phases())


def write_run_snapshot(record: RunRecord, path: str | Path) -> None:
    """Write a snapshot of a recorded run to `path`.

    On CUDA it is PyTorch's own. Raises RequestError if that fails.
    """
    if record.on_device:
        if record.device_snapshot is None:
            raise RequestError("PyTorch's memory was not recorded: record with snapshot=True")
        write_whole(path, pickle.dumps(record.device_snapshot, protocol=PICKLE_PROTOCOL))
        return
    # Each storage is a block; a step begins with its first change.
    origins: list[Origin] = []
    rows: list[tuple[int, int, int]] = []
    live: dict[int, int] = {}
    begun: dict[int, int] = {}
    for change in record.changes_in_steps():
        begun.setdefault(change.step, len(rows))
        if change.nbytes < 0:
            rows.append((FREE, live.pop(change.storage), 0))
            continue
        live[change.storage] = len(origins)
        rows.append((ALLOCATE, len(origins), change.nbytes))
        origins.append(_origin_of(change))
    starts = [begun[step] for step in sorted(begun)]
    spans = [
        Span(f"step {step + 1}", begin, end)
        for step, begin, end in zip(sorted(begun), starts, [*starts[1:], len(rows)], strict=True)
    ]
    write_snapshot(path, _events(rows), origins=origins, spans=spans)


def _origin_of(change: MemoryChange) -> Origin:
    """Return the origin of a measured storage: the op or the transfer that ran when it was first seen."""
    step = ("run", change.step + 1, f"step {change.step + 1}")
    if change.label is None:
        what = "storage" if change.kind is None else change.kind.value
        of = UNKNOWN_CATEGORY if change.kind is None else category(change.kind)
        return Origin(((what, 0, "outside planned ops"), step), of)
    graph, verb, target, _ = change.label
    kind: TensorKind | None
    if change.label.is_op:
        op = graph.ops[target]
        # Which of the op's outputs it is, is known by its size only.
        made = [graph.tensors[t] for t in op.writes if graph.tensors[t].nbytes == change.nbytes]
        kind = made[0].kind if len({tensor.kind for tensor in made}) == 1 else None
        names = " or ".join(tensor.name for tensor in made[:3]) or f"of {op.name}"
        first = (kind.value if kind else "storage", op.id, names)
        return _origin(graph, first, op.id, (("schedule", target, f"{verb}, {op.phase.value}"), step), kind)
    tensor = graph.tensors[target]
    first = (tensor.kind.value, target, tensor.name)
    why = "given" if verb is None else verb.value
    return _origin(graph, first, graph.producer.get(target), (("schedule", target, why), step), tensor.kind)


def _origin(graph: Graph, first: Frame, op: int | None, last: Frames, kind: TensorKind | None) -> Origin:
    """Return frames that name a tensor, its op, and its purpose; the op's lines of Python are among them."""
    made = () if op is None else ((graph.ops[op].layer or "(outside layers)", op, graph.ops[op].name),)
    said = [name for _, _, name in (first, *made, *last)]
    if source := graph.source(op):
        said.append(source)
    python = frames_of(next(iter(graph.stacks(op)), ()))  # of a kernel of several ops that of the last
    frames = (first, *made, *python, *last)
    return Origin(frames, category(kind) if kind else UNKNOWN_CATEGORY, " | ".join(said))


def _events(rows: Sequence[tuple[int, int, int]]) -> Events:
    """Return columns of allocations and frees, from `(action, block, bytes)` rows."""
    action, block, nbytes = zip(*rows, strict=True) if rows else ((), (), ())
    return Events(np.array(action), np.array(block), np.array(nbytes), np.zeros(len(action), np.int32))


class _SnapshotStep:
    """The allocations of one simulated step.

    Each stay of a tensor on the device is a block, and so is each op's scratch space.
    """

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.graph
        self.schedule: Schedule = plan.schedule
        self.origins: list[Origin] = []
        self.rows: list[tuple[int, int, int]] = []
        self._begun: dict[int, int] = {}
        """The number of rows before each instruction."""
        self._walk(plan)

    def phases(self) -> list[Span]:
        """Return the phases of the step, as ranges of events."""
        instructions, ops = self.schedule.instructions, self.graph.ops
        runs = [(ops[i.target].phase, at) for at, i in enumerate(instructions) if i.verb is Verb.RUN]
        starts = [(phase, self._begun[next(iter(group))[1]]) for phase, group in groupby(runs, key=lambda run: run[0])]
        ends = [begin for _, begin in starts[1:]] + [len(self.rows)]
        return [Span(phase.value, begin, end) for (phase, begin), end in zip(starts, ends, strict=True)]

    def _walk(self, plan: Plan) -> None:
        at = {t: self._allocate(t, "there before the step", 0) for t in present_first(self.graph, self.schedule)}
        running: dict[int, None] = {}  # collectives, which hold their workspace beside other instructions
        for index, appearing, scratch_bytes, leaving in changes_of(self.graph, self.schedule, plan.timeline):
            self._begun[index] = len(self.rows)
            verb, target = self.schedule.instructions[index].verb, self.schedule.instructions[index].target
            for tensor in appearing:
                at[tensor] = self._allocate(tensor, verb, index)
            if verb is Verb.START:
                running[target] = None
            elif verb in OF_OPS:
                running.pop(target, None)
            if scratch_bytes:
                op = self.graph.ops[target if verb in OF_OPS else next(reversed(running))]
                why = _instruction(f"{verb}, {op.phase.value}", index)
                first = ("workspace", op.id, f"workspace of {op.name}")
                self._free(self._block(scratch_bytes, first, op.id, why, TensorKind.WORKSPACE))
            for tensor in leaving:
                self._free(at.pop(tensor))

    def _allocate(self, tensor: int, why: str, index: int) -> int:
        made = self.graph.tensors[tensor]
        producer = self.graph.producer.get(tensor)
        if producer is not None:
            why = f"{why}, {self.graph.ops[producer].phase.value}"
        return self._block(
            made.nbytes, (made.kind.value, tensor, made.name), producer, _instruction(why, index), made.kind
        )

    def _block(self, nbytes: int, first: Frame, op: int | None, last: Frames, kind: TensorKind) -> int:
        block = len(self.origins)
        self.origins.append(_origin(self.graph, first, op, last, kind))
        self.rows.append((ALLOCATE, block, nbytes))
        return block

    def _free(self, block: int) -> None:
        self.rows.append((FREE, block, 0))


def _instruction(why: str, index: int) -> Frames:
    return (("schedule", index, why),)
