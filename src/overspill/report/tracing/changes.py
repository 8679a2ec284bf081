"""The tensors that each instruction adds to and removes from memory.

Traces and snapshots are made of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overspill.core import Graph, Instruction, Schedule, Timeline, Verb
from overspill.report.plan import made_by


class InstructionChange(NamedTuple):
    """The memory change of one instruction, at `position`.

    Tensors that appear, bytes that are there while it lasts alone, and tensors that go.
    """

    position: int
    appearing: tuple[int, ...]
    scratch_bytes: int
    leaving: tuple[int, ...]


def present_first(graph: Graph, schedule: Schedule) -> list[int]:
    """The tensors on the device when the step begins."""
    stored = frozenset(schedule.stored)
    return [t.id for t in graph.tensors if t.persistent and t.id not in stored]


def changes_of(graph: Graph, schedule: Schedule, timeline: Timeline) -> Iterator[InstructionChange]:
    """The memory change of each instruction, in order.

    Scratch is what `timeline` has of live bytes beyond those of tensors.
    """
    present = set(present_first(graph, schedule))
    live = sum(graph.tensors[t].nbytes for t in present)
    for index, (instruction, peak) in enumerate(zip(schedule.instructions, timeline.live_bytes, strict=True)):
        new = tuple(t for t in dict.fromkeys(_brought_by(graph, instruction)) if t not in present)
        gone = (instruction.target,) if instruction.verb is Verb.FREE and instruction.target in present else ()
        present.update(new)
        live += sum(graph.tensors[t].nbytes for t in new)
        yield InstructionChange(index, new, peak - live, gone)
        present.difference_update(gone)
        live -= sum(graph.tensors[t].nbytes for t in gone)


def _brought_by(graph: Graph, instruction: Instruction) -> tuple[int, ...]:
    """The tensors that an instruction puts on the device."""
    return (instruction.target,) if instruction.verb is Verb.PREFETCH else made_by(graph, instruction)
