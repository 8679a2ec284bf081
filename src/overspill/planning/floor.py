"""The smallest budget in which a step can run, and its cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from overspill.core import OF_OPS, Graph, Phase, Schedule, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_apart, format_bytes
from overspill.simulate import check

from .algorithms import fastest_within, memory_optimal
from .gaps import swappable_gaps
from .step_program import Gap, StepProgram


@dataclass(frozen=True)
class Floor:
    """The smallest budget in bytes, and the op and tensors that need it."""

    nbytes: int
    cause: str


def floor_of(program: StepProgram, fetched: Mapping[Gap, int] | None = None) -> Floor:
    """Return the floor of `program` with every swappable tensor away in all its gaps.

    If `fetched` is given, only tensors of these gaps are away, each until the step given.
    """
    graph = program.graph
    absent = {gap: gap.end for gap in swappable_gaps(program)} if fetched is None else fetched
    live = program.live_bytes(absent)
    for gap, back in absent.items():
        # Tensors that are back before the gap ends.
        live[back : gap.end] += graph.tensors[gap.tensor].nbytes
    if not live.size:
        return Floor(graph.persistent_bytes, "persistent tensors")
    # The step that needs most, and the tensors that are there.
    position = int(np.argmax(live))
    step = program.steps[position]
    away = {gap.tensor for gap, back in absent.items() if Gap(gap.tensor, gap.start, back).covers(position)}
    away |= {gap.tensor for gap in program.gaps if gap.rematerialized and gap.covers(position)}
    there = [
        tensor.id
        for tensor in graph.tensors
        if not tensor.persistent
        and (touches := program.touches[tensor.id])
        and touches[0] <= position <= touches[-1]
        and tensor.id not in away
    ]
    op = program.op(step)
    return Floor(
        int(live[position]),
        f"{_persistent(graph)} + {_op_tensors(graph, there)} at {op.name} of {op.layer or graph.name}",
    )


def algorithms_within(program: StepProgram, budget_bytes: int) -> dict[int, int]:
    """Return algorithms of ops that cannot take their fastest even with every swappable tensor away.

    For each it is the fastest whose workspace fits then, otherwise the smallest. No plan within the budget is faster
    there.
    """
    graph = program.graph
    least = program.with_algorithms(memory_optimal(graph))
    alone = least.live_bytes(swappable_gaps(least))
    found: dict[int, int] = {}
    for position, step in enumerate(least.steps):
        op = least.op(step)
        if op.algorithms:
            room = budget_bytes - int(alone[position]) + op.workspace_of(least.algorithm(step))
            found[op.id] = max(fastest_within(op, room), found.get(op.id, 0))
    return {op: number for op, number in found.items() if number}


def infeasible(program: StepProgram, budget_bytes: int, policy: str) -> InfeasibleBudgetError:
    """Return the error for a budget below the floor of `program`."""
    return below(floor_of(program), budget_bytes, policy)


def peak_of(graph: Graph, schedule: Schedule) -> Floor:
    """Return the peak bytes of `schedule`, where it is, and the largest tensors then; its own budget does not count."""
    result = check(graph, replace(schedule, budget_bytes=None))
    if result.peak_instruction < 0:
        return Floor(result.peak_bytes, "persistent tensors")
    peak = schedule.instructions[result.peak_instruction]
    if peak.verb in OF_OPS:
        where = f"{graph.ops[peak.target].name} of {graph.ops[peak.target].layer or graph.name}"
    else:
        where = f"{peak.verb} of {graph.tensors[peak.target].name}"
    largest = sorted(result.live_at_peak, key=lambda t: graph.tensors[t].nbytes, reverse=True)[:3]
    tensors = " + ".join(f"{graph.tensors[t].name} {format_bytes(graph.tensors[t].nbytes)}" for t in largest)
    return Floor(result.peak_bytes, f"at {where}, largest {tensors}")


def below(floor: Floor, budget_bytes: int, policy: str) -> InfeasibleBudgetError:
    """Return the error for a budget below `floor`, the smallest that `policy` works in."""
    budget, least = format_apart(budget_bytes, floor.nbytes)
    return InfeasibleBudgetError(
        f"infeasible: budget {budget} is below the minimum of policy {policy}, {least} "
        f"({floor.cause}); raise the budget or make the batch smaller",
        budget_bytes=budget_bytes,
        floor_bytes=floor.nbytes,
        cause=floor.cause,
    )


def _persistent(graph: Graph) -> str:
    kinds = {
        "parameters": TensorKind.PARAMETER,
        "gradients kept": TensorKind.GRADIENT,
        "optimizer state": TensorKind.OPTIMIZER_STATE,
        "inputs": TensorKind.INPUT,
    }
    held = {
        word: sum(t.nbytes for t in graph.tensors if t.persistent and not t.movable and t.kind is kind)
        for word, kind in kinds.items()
    }
    return " + ".join(f"{word} {format_bytes(nbytes)}" for word, nbytes in held.items() if nbytes)


def _op_tensors(graph: Graph, there: list[int], shown: int = 3) -> str:
    largest = sorted(there, key=lambda t: graph.tensors[t].nbytes, reverse=True)
    named = [f"{graph.tensors[t].name} {format_bytes(graph.tensors[t].nbytes)}" for t in largest[:shown]]
    if rest := sum(graph.tensors[t].nbytes for t in largest[shown:]):
        named.append(f"{len(largest) - shown} more {format_bytes(rest)}")
    return " + ".join(named)


def retained_bytes(graph: Graph, schedule: Schedule) -> int:
    """Return the bytes that `schedule` keeps on the device from forward to backward, without persistent tensors."""
    present: set[int] = set()
    for instruction in schedule.instructions:
        target = instruction.target
        if instruction.verb is Verb.RUN:
            if graph.ops[target].phase is not Phase.FORWARD:
                break
            present.update(t for t in graph.ops[target].writes if not graph.tensors[t].persistent)
        elif instruction.verb is Verb.FREE:
            present.discard(target)
        elif instruction.verb is Verb.PREFETCH and not graph.tensors[target].persistent:
            present.add(target)
    return sum(graph.tensors[t].nbytes for t in present)
