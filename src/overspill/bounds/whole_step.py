"""A lower bound on a whole step's time, for any order of updates.

Two relaxations. The first leaves the updates out: no optimizer state, no time for them, and no gradient outlives
backward. The rest of any schedule is a schedule of forward and backward, for which `step_time.py` has a bound; the time
of updates that ran in between only lengthened it. The second counts bytes. Where an op has no room for everything that
outlives the step, the rest is away; each of these tensors is used in every step, so it comes back over the link once a
step at least, and if it is updated it also leaves once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overspill.core import Device, Graph, Phase, numbered
from overspill.planning.gaps import swappable_gaps
from overspill.planning.step_program import StepProgram

from .step_time import lower_bound_seconds


def whole_step_bound_seconds(graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> float:
    """Seconds that no schedule of the whole step beats within the budget.

    Wherever it puts the updates.
    """
    kept = [op.id for op in graph.ops if op.phase is not Phase.UPDATE]
    rest = without_updates(graph, kept)
    compute = sum(seconds)
    moving = forced_link_seconds(graph, device, budget_bytes)
    # A transfer concurrent with compute takes a share of it; one that compute waits for takes all of its time. The
    # time by which it slows down an op is itself time in which it runs, hence the denominator.
    share = device.transfer_compute_share / (1 + device.transfer_compute_share)
    return max(
        compute + share * moving,
        moving,
        lower_bound_seconds(rest, device, budget_bytes, [seconds[op] for op in kept]),
    )


def without_updates(graph: Graph, kept: Sequence[int]) -> Graph:
    """The ops `kept` of `graph`, without persistent tensors that only others use, unless immovable."""
    used = {t for op in kept for t in (*graph.ops[op].reads, *graph.ops[op].writes)}
    tensors = (replace(t, persistent=t.persistent and (t.id in used or not t.movable)) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors), ops=numbered(graph.ops[op] for op in kept))


def forced_link_seconds(graph: Graph, device: Device, budget_bytes: int) -> float:
    """Least seconds for which the link's busier direction is in use.

    Of a half-duplex link, the link itself.
    """
    program = StepProgram(graph)
    tensors = graph.tensors
    away_somewhere = {gap.tensor for gap in swappable_gaps(program)}
    moving = {t.id: t.nbytes for t in tensors if t.persistent and t.id in away_somewhere}
    fixed = sum(t.nbytes for t in tensors if t.persistent and not t.movable)
    total, away = sum(moving.values()), 0
    # Most bytes that must be away at some op.
    for op in graph.ops:
        own = dict.fromkeys((*op.reads, *op.writes))
        others = total - sum(moving.get(t, 0) for t in own)
        needed = sum(tensors[t].nbytes for t in own if tensors[t].movable or not tensors[t].persistent)
        least = min((a.workspace_bytes for a in op.algorithms), default=op.workspace_bytes)
        away = max(away, min(others, fixed + needed + least + others - budget_bytes))
    constant = sum(nbytes for t, nbytes in moving.items() if not program.written[t])
    inward = away / device.prefetch_bytes_per_second
    outward = max(0, away - constant) / device.offload_bytes_per_second
    return max(inward, outward) if device.full_duplex else inward + outward
