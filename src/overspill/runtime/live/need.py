"""Bytes that a plan takes of a live pool on the CPU.

The pool itself is asked, with memory that is never touched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from overspill.core import Graph, Mobility, Tensor, TensorKind, Trace
from overspill.placement.events import FREE, Events
from overspill.placement.place import Placed
from overspill.placement.simulated_device import round_up
from overspill.plans.plan import Plan
from overspill.simulate import trace_of

from .allocator import ALIGNMENT_BYTES, CHUNK_BYTES, LiveAllocator, Statistics
from .groups import forget_groups, staying, tell_group

TWO_ENDED, VIRTUAL = "two-ended", "virtual"
LIVE_PLACEMENTS = (TWO_ENDED, VIRTUAL)
"""Placements in a pool of ours that serves PyTorch."""
CHUNKS = 400
"""The paper's card of 16 GB over its chunk of 40 MiB."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Need:
    """Bytes of a plan in a pool: `main_bytes` two-ended, `beside_bytes` elsewhere."""

    main_bytes: int
    beside_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of both."""
        return self.main_bytes + self.beside_bytes


def chunk_bytes(budget_bytes: int) -> int:
    """Bytes of a physical chunk for a CPU budget, by the paper's share."""
    return min(CHUNK_BYTES, max(PAGE_BYTES, budget_bytes // CHUNKS // PAGE_BYTES * PAGE_BYTES))


def lies_outside(graph: Graph, tensor: Tensor) -> bool:
    """Whether a tensor always lies outside a CPU pool.

    It was there before the first planned program ran. A whole step takes the weights and state that it moves into the
    pool; a compiled model neither, but its gradients.
    """
    if not tensor.persistent or tensor.kind in (TensorKind.BUFFER, TensorKind.INPUT):
        return tensor.persistent
    if graph.whole_step:
        return not tensor.movable
    return tensor.kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE)


def outside_bytes(graph: Graph) -> int:
    """Bytes of tensors that always lie outside a CPU pool."""
    return sum(t.nbytes for t in graph.tensors if lies_outside(graph, t))


def need_of(plan: Plan, placement: str, budget_bytes: int) -> Need:
    """The bytes that `plan` takes of the pool for `placement`.

    Its sizes are for `budget_bytes`. Raises RequestError.
    """
    trace = _inside(plan)
    if placement == TWO_ENDED:
        ample = sum(round_up(block.nbytes, ALIGNMENT_BYTES) for block in trace.blocks)
        found = _run(LiveAllocator("host", TWO_ENDED, main_bytes=max(ample, 1)), trace)
        return Need(found.main_bytes - found.least_gap_bytes, found.peak_reserved_bytes - found.main_bytes)
    chunk = chunk_bytes(budget_bytes)
    return Need(0, _run(LiveAllocator("host", VIRTUAL, chunk_bytes=chunk), trace).peak_reserved_bytes)


def _inside(plan: Plan) -> Trace:
    """The blocks of a step that lie in the pool, with their groups."""
    away = {t.name for t in plan.graph.tensors if lies_outside(plan.graph, t)}
    stays = staying(plan.graph)
    blocks = [b for b in trace_of(plan.graph, plan.schedule, plan.groups).blocks if b.name not in away]
    return Trace(
        tuple(
            replace(b, id=i, alignment=ALIGNMENT_BYTES, mobility=Mobility.RECLAIMED if b.name in stays else b.mobility)
            for i, b in enumerate(blocks)
        )
    )


def _run(pool: LiveAllocator, trace: Trace) -> Statistics:
    """The pool's statistics after one step, without touching its memory."""
    events = Events.of(trace)
    columns = (events.action, events.block, events.nbytes, events.mobility)
    addresses: dict[int, int] = {}
    told = None
    try:
        for action, block, nbytes, mobility in zip(*(column.tolist() for column in columns), strict=True):
            if action == FREE:
                pool.free(addresses.pop(block))
                continue
            if mobility != told:
                tell_group(told := mobility)
            addresses[block] = pool.allocate(nbytes)
    finally:
        forget_groups()
    return pool.statistics()


def placed_live(plan: Plan, placement: str, budget_bytes: int) -> Placed:
    """How the plan's blocks lie with a live placement on the CPU.

    Inside the pool, and outside as they are.
    """
    began = time.perf_counter()
    need = need_of(plan, placement, budget_bytes).total_bytes + outside_bytes(plan.graph)
    bound = trace_of(plan.graph, plan.schedule, plan.groups).lower_bound_bytes
    return Placed(placement, max(need, bound), bound, None, time.perf_counter() - began)
