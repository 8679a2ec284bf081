"""Planned addresses: a step's blocks are in one arena, at addresses solved before it starts.

The arena holds every tensor that comes back from the store, and every result that an op makes in memory that it is
given. Each has its lifetime in the schedule, forward and backward together. Tensors that leave the step (outputs,
gradients) are outside, because their owner decides how long they live. So is what ops and libraries allocate for
themselves. Weights and state that a whole step moves are in the arena, between steps too. So a step has one arena from
its beginning to its end, and a call keeps all of that arena between forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from overspill.capture.compiled.graph import GRADIENTS
from overspill.capture.compiled.result_memory import scratch_in_pieces
from overspill.capture.compiled.whole_step import ACCUMULATE
from overspill.core import Block, Graph, Phase, Places, Schedule, Trace, Verb
from overspill.core.errors import RequestError
from overspill.plans.account import Account
from overspill.plans.plan import Plan
from overspill.simulate import owned_trace

from .packing import DEFAULT, Limits, Solver, solver_named
from .place import SEARCH

ALIGNMENT = 512
"""Alignment of addresses in bytes, as PyTorch's CUDA allocator gives, by which libraries choose their kernels."""


def places_of(
    graph: Graph, schedule: Schedule, groups: Iterable[Sequence[int]], solver: Solver, limits: Limits, grain: int = 1
) -> Places:
    """Return addresses of the arena's blocks under `schedule`.

    Only the multiple of `grain` bytes that the arena needs counts: a layout within the least such is not improved. The
    solver's layout is checked before it is used. Raises RequestError if it has none.
    """
    inside: list[Block] = []
    outside: list[Block] = []
    keys: list[tuple[int, int]] = []
    backward = first_backward(graph, schedule)
    retained = 0
    trace, owners = owned_trace(graph, schedule, groups)
    blocks = list(zip(trace.blocks, owners, strict=True))
    residents = _residents(graph, schedule, blocks)
    ends = {tensor: block.gaps[0][1] if block.gaps else 0 for tensor, block in residents.items()}
    may_lie = _may_lie(graph, schedule) | ends.keys()
    for block, tensor in blocks:
        if tensor in ends and block.start in (0, ends[tensor]):
            continue
        if block.nbytes and tensor in may_lie and _is_given(graph, schedule, block.start, tensor):
            inside.append(block)
            keys.append((tensor, block.start))
            instruction = schedule.instructions[block.start]
            if instruction.verb is not Verb.PREFETCH:
                scratch = scratch_in_pieces(graph, graph.ops[instruction.target], tensor)
                outside.append(Block(len(outside), block.start, block.start + 1, scratch))
            continue
        outside.append(replace(block, id=len(outside)))
        if tensor >= 0 and not graph.tensors[tensor].persistent and block.start < backward <= block.end:
            retained += block.nbytes
    keys += ((tensor, ends[tensor]) for tensor in residents)
    inside += residents.values()
    numbered = Trace(tuple(replace(block, id=i, alignment=ALIGNMENT) for i, block in enumerate(inside)))
    if grain > 1:
        limits = replace(limits, capacity_bytes=-(-numbered.lower_bound_bytes // grain) * grain)
    layout = solver.solve(numbered, limits).layout
    if layout is None:
        raise RequestError(f"the solver {solver.name!r} found no layout within its time")
    offsets = dict(zip(keys, layout.offsets, strict=True))
    between = {tensor: block.pinned for tensor, block in residents.items() if block.pinned is not None}
    return Places(offsets, layout.peak_bytes, Trace(tuple(outside)).lower_bound_bytes, retained, between)


def _residents(graph: Graph, schedule: Schedule, blocks: Iterable[tuple[Block, int]]) -> dict[int, Block]:
    """Return one block for each tensor that is on the device between steps, with a gap while it is not.

    The address of its last block in one step is that of its first in the next. These blocks are at the bottom of the
    arena. Those that are away for longer are higher up, so that other blocks find their memory in one piece. A step of
    several micro-batches one after another has none, because its graphs would have other addresses.
    """
    sums = (t for op in graph.ops if op.name == ACCUMULATE for t in op.writes)
    if not graph.whole_step or any(graph.tensors[t].persistent for t in sums):
        return {}
    found: dict[int, list[Block]] = defaultdict(list)
    for block, tensor in blocks:
        if tensor >= 0 and graph.tensors[tensor].persistent and graph.tensors[tensor].movable and block.nbytes:
            found[tensor].append(block)
    made: list[tuple[int, Block]] = []
    for tensor, of in found.items():
        if tensor not in schedule.stored:
            first, last = min(of, key=lambda block: block.start), max(of, key=lambda block: block.start)
            gaps = ((first.end, last.start),) if first is not last else ()
            made.append((tensor, replace(first, end=last.end, gaps=gaps)))
    # From the bottom upwards.
    offset, placed = 0, {}
    for tensor, block in sorted(made, key=lambda one: sum(end - start for start, end in one[1].gaps)):
        placed[tensor] = replace(block, pinned=offset)
        offset = -(-(offset + block.nbytes) // ALIGNMENT) * ALIGNMENT
    return placed


def _may_lie(graph: Graph, schedule: Schedule) -> set[int]:
    """Return the tensors that nothing outside of the step ever sees on the device."""
    handed = {tensor for op in graph.ops if op.name == GRADIENTS for tensor in op.reads}
    stored = set(schedule.stored)
    return {t.id for t in graph.tensors if t.movable and t.id not in handed and (not t.persistent or t.id in stored)}


def _is_given(graph: Graph, schedule: Schedule, position: int, tensor: int) -> bool:
    """Return whether the instruction there, which allocates `tensor`, can be given memory for it."""
    instruction = schedule.instructions[position]
    return instruction.verb is Verb.PREFETCH or tensor in graph.ops[instruction.target].given


def first_backward(graph: Graph, schedule: Schedule) -> int:
    """Return the position of the first op that is not of forward."""
    runs = (at for at, i in enumerate(schedule.instructions) if i.verb is Verb.RUN)
    phases = ((at, graph.ops[schedule.instructions[at].target].phase) for at in runs)
    return next((at for at, phase in phases if phase is not Phase.FORWARD), len(schedule.instructions))


def in_arena(plan: Plan, solver: Solver, limits: Limits, grain: int = 1) -> Plan:
    """Return `plan` with the places of its blocks in an arena, all of which it retains; `grain` as in `places_of`.

    Its peak is then that of the arena and of the bytes live outside it.
    """
    places = places_of(plan.graph, plan.schedule, plan.groups, solver, limits, grain)
    kept = places.arena_bytes + places.retained_bytes
    return replace(plan, places=places, retained_bytes=kept, peak_bytes=places.total_bytes, pool=solver.name)


@dataclass(frozen=True)
class ArenaAccount(Account):
    """Count the arena of a step and what is live outside of it, on a device that is no card."""

    @property
    def placed_by(self) -> str:
        """The name of the solver of addresses."""
        return DEFAULT

    @property
    def has_arena(self) -> bool:
        """Whether blocks are at planned addresses in one arena."""
        return True

    def placed(self, plan: Plan) -> Plan:
        """Return `plan` with its blocks at addresses; its peak is then what it takes."""
        return in_arena(plan, solver_named(DEFAULT), SEARCH)
