"""The tensors that each instruction adds to and removes from memory.

Traces and snapshots use these changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overspill.core import Graph, Instruction, Schedule, Timeline, Verb
from overspill.report.plan import made_by


class InstructionChange(NamedTuple):
    """The memory change of one instruction, at `position`."""

    position: int
    appearing: tuple[int, ...]
    """Tensors that appear on the device."""
    scratch_bytes: int
    """Bytes in use only while the instruction runs."""
    leaving: tuple[int, ...]
    """Tensors that leave the device."""


def present_first(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the tensors on the device when the step begins."""
    stored = frozenset(schedule.stored)
    return [t.id for t in graph.tensors if t.persistent and t.id not in stored]


def changes_of(graph: Graph, schedule: Schedule, timeline: Timeline) -> Iterator[InstructionChange]:
    """Yield the memory change of each instruction, in order.

    Scratch is the live bytes of `timeline` minus those of tensors.
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
    """Return the tensors that an instruction puts on the device."""
    return (instruction.target,) if instruction.verb is Verb.PREFETCH else made_by(graph, instruction)
