"""Split a schedule into forward and backward, and find the tensors that cross."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from overspill.core import Graph, Instruction, Phase, Schedule, Verb


def split(graph: Graph, schedule: Schedule) -> tuple[Sequence[Instruction], Sequence[Instruction]]:
    """Return the instructions of forward and of backward, without the update."""
    instructions = schedule.instructions
    last = max(
        (i for i, x in enumerate(instructions) if x.verb is Verb.RUN and graph.ops[x.target].phase is Phase.FORWARD),
        default=-1,
    )
    cut = last + 1
    while cut < len(instructions) and instructions[cut].verb in (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.FREE):
        cut += 1
    return instructions[:cut], instructions[cut:]


def crossing(graph: Graph, captured: Container[int], backward: Iterable[Instruction]) -> tuple[list[int], list[int]]:
    """Return the tensors that backward reads or frees, and those it prefetches, in order.

    `captured` are the ops that it carries out itself. Some of both may be made in backward.
    """
    read: dict[int, None] = {}
    prefetched: dict[int, None] = {}
    for instruction in backward:
        target = instruction.target
        if instruction.verb is Verb.RECOMPUTE:
            read.update(dict.fromkeys(graph.ops[target].recompute_reads))
        elif instruction.verb is Verb.RUN and target in captured:
            read.update(dict.fromkeys(graph.ops[target].reads))
        elif instruction.verb in (Verb.FREE, Verb.OFFLOAD) and not graph.tensors[target].persistent:
            read.setdefault(target)
        elif instruction.verb is Verb.PREFETCH:
            prefetched.setdefault(target)
    return list(read), list(prefetched)
