"""Carry a schedule over to a graph that differs in some ops of backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from difflib import SequenceMatcher

from overspill.core import OF_OPS, Graph, Instruction, Op, Schedule, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.simulate import check

RUNS = (Verb.RUN, Verb.RECOMPUTE)


def carried_over(schedule: Schedule, graph: Graph, other: Graph) -> Schedule | None:
    """Return `schedule` of `graph` carried over to `other`; None if it is not valid there.

    Ops that only `other` has run before the next op that both have. Tensors that backward makes or prefetches are freed
    after their last use.
    """
    # Match ops, then tensors: persistent ones by position, others by the op that writes them.
    ops = _alike(graph, other)
    tensors = dict(zip(_given(graph), _given(other), strict=False))
    for one, two in ops.items():
        tensors.update(zip(graph.ops[one].writes, other.ops[two].writes, strict=False))
    before: dict[int, list[int]] = defaultdict(list)
    common = sorted(ops.values())
    for op in sorted(set(range(len(other.ops))) - set(common)):
        before[next((two for two in common if two > op), -1)].append(op)
    made: list[Instruction] = []
    # Translate the instructions, running the extra ops on the way.
    for instruction in schedule.instructions:
        if instruction.verb not in OF_OPS:
            if (tensor := tensors.get(instruction.target)) is not None:
                made.append(replace(instruction, target=tensor))
        elif (op := ops.get(instruction.target, -1)) >= 0:
            if instruction.verb is Verb.RUN:
                made += [Instruction(Verb.RUN, extra) for extra in before[op]]
            made.append(replace(instruction, target=op))
    found = replace(schedule, instructions=_freed_after_use(made, other))
    try:
        check(other, found)
    except InvalidScheduleError:
        return None
    return found


def _alike(graph: Graph, other: Graph) -> dict[int, int]:
    """Return the ops that both graphs have, in the same order: id in `graph` to id in `other`."""

    def kinds(of: Graph) -> list[tuple[str, str, int]]:
        return [(op.name, op.layer, len(op.writes)) for op in of.ops]

    blocks = SequenceMatcher(None, kinds(graph), kinds(other), autojunk=False).get_matching_blocks()
    return {one + i: two + i for one, two, length in blocks for i in range(length)}


def _given(graph: Graph) -> list[int]:
    return [tensor.id for tensor in graph.tensors if tensor.persistent]


def _touched(instruction: Instruction, op: Op) -> tuple[int, ...]:
    return op.recompute_reads + op.recompute_writes if instruction.verb is Verb.RECOMPUTE else op.reads + op.writes


def _freed_after_use(made: list[Instruction], graph: Graph) -> tuple[Instruction, ...]:
    """Return the instructions, with each temporary tensor's last free moved right after its last use."""
    # Last use and last free of each tensor.
    used: dict[int, int] = {}
    freed: dict[int, int] = {}
    for index, instruction in enumerate(made):
        if instruction.verb in RUNS:
            used.update(dict.fromkeys(_touched(instruction, graph.ops[instruction.target]), index))
        elif instruction.verb is Verb.FREE:
            freed[instruction.target] = index
        elif instruction.verb not in OF_OPS:
            used[instruction.target] = index
    # Replace those frees.
    stay = {tensor.id for tensor in graph.tensors if tensor.persistent} | set(graph.outputs)
    late: dict[int, list[int]] = defaultdict(list)
    for tensor, index in used.items():
        if tensor not in stay:
            late[index].append(tensor)
    superfluous = {index for tensor, index in freed.items() if tensor not in stay}
    result = []
    for index, instruction in enumerate(made):
        if index not in superfluous:
            result.append(instruction)
        result += [Instruction(Verb.FREE, tensor) for tensor in late[index]]
    return tuple(result)
