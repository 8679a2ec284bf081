"""A plan's step as a memory snapshot of PyTorch's, for pytorch.org/memory_viz and torch.cuda._memory_viz.

Allocations and frees are those of the schedule, in its order; their addresses are those that PyTorch's caching allocator
would give them, simulated.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np

from overspill.core import Graph, Schedule, TensorKind, Verb
from overspill.estimation.peak import category
from overspill.placement.events import ALLOCATE, FREE, Events
from overspill.placement.snapshot import Origin, Span, write_snapshot
from overspill.plans.plan import Plan

from .changes import changes_of, present_first


def write_plan_snapshot(plan: Plan, path: str | Path) -> None:
    """Write the simulated step of `plan` to `path`. Raises RequestError where that fails."""
    step = _Step(plan)
    write_snapshot(path, step.events(), origins=step.origins, spans=step.phases())


class _Step:
    """The allocations of one step: each stay of a tensor on the device is a block, and so is each op's scratch space."""

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.graph
        self.schedule: Schedule = plan.schedule
        self.origins: list[Origin] = []
        self._rows: list[tuple[int, int, int]] = []
        self._begun: dict[int, int] = {}
        """How many rows there were before each instruction."""
        self._walk(plan)

    def events(self) -> Events:
        """The allocations and frees, in order."""
        action, block, nbytes = zip(*self._rows, strict=True) if self._rows else ((), (), ())
        return Events(np.array(action), np.array(block), np.array(nbytes), np.zeros(len(action), np.int32))

    def phases(self) -> list[Span]:
        """The parts of the step, in events."""
        instructions, ops = self.schedule.instructions, self.graph.ops
        runs = [(ops[i.target].phase, at) for at, i in enumerate(instructions) if i.verb is Verb.RUN]
        starts = [(phase, self._begun[next(iter(group))[1]]) for phase, group in groupby(runs, key=lambda run: run[0])]
        ends = [begin for _, begin in starts[1:]] + [len(self._rows)]
        return [Span(phase.value, begin, end) for (phase, begin), end in zip(starts, ends, strict=True)]

    def _walk(self, plan: Plan) -> None:
        at = {t: self._allocate(t, "there before the step", 0) for t in present_first(self.graph, self.schedule)}
        for index, appearing, scratch_bytes, leaving in changes_of(self.graph, self.schedule, plan.timeline):
            self._begun[index] = len(self._rows)
            verb, target = self.schedule.instructions[index].verb, self.schedule.instructions[index].target
            for tensor in appearing:
                at[tensor] = self._allocate(tensor, verb, index)
            if scratch_bytes:
                op = self.graph.ops[target]
                frames = (("workspace", op.id, f"workspace of {op.name}"), *self._op_frames(op.id, verb, index))
                scratch = self._block(scratch_bytes, frames, TensorKind.WORKSPACE)
                self._free(scratch)
            for tensor in leaving:
                self._free(at.pop(tensor))

    def _allocate(self, tensor: int, why: str, index: int) -> int:
        made = self.graph.tensors[tensor]
        producer = self.graph.producer.get(tensor)
        by = self._op_frames(producer, why, index) if producer is not None else (("schedule", index, why),)
        return self._block(made.nbytes, ((made.kind.value, tensor, made.name), *by), made.kind)

    def _op_frames(self, op: int, why: str, index: int) -> tuple[tuple[str, int, str], ...]:
        made = self.graph.ops[op]
        return (made.layer or "(outside layers)", op, made.name), ("schedule", index, f"{why}, {made.phase.value}")

    def _block(self, nbytes: int, frames: tuple[tuple[str, int, str], ...], kind: TensorKind) -> int:
        block = len(self.origins)
        self.origins.append(Origin(frames, category(kind), " | ".join(name for _, _, name in frames)))
        self._rows.append((ALLOCATE, block, nbytes))
        return block

    def _free(self, block: int) -> None:
        self._rows.append((FREE, block, 0))
