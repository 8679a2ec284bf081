"""Planned addresses for compiled programs: buffers lie in one solved arena.

Every buffer that a program allocates, and every tensor that comes back from the store, is a block with its lifetime in
the schedule, forward and backward together. What leaves the step (outputs, gradients) is not, for its owner decides how
long it lives, and neither is what library calls allocate for themselves. So a call has one arena from its forward to
the end of its backward, and all of that arena is what it keeps between them.

Names private to PyTorch that this file relies on (2.11 to 2.14): `torch._C._construct_storage_from_data_pointer`, so
that each buffer has a storage of its own, and `torch._C._storage_Use_Count`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from overspill.capture.compiled.graph import Captured
from overspill.capture.programs.functions import allocated_as
from overspill.core import Block, Schedule, Trace, Verb
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.core.units import format_apart
from overspill.placement.packing import Limits, Solver
from overspill.placement.place import REPLANS
from overspill.plans.plan import Plan, retained_bytes
from overspill.simulate import trace_of

from .transfer.forks import ForkedLock

ALIGNMENT = 64
"""Alignment of addresses in bytes, as PyTorch's CPU allocator gives."""


@dataclass(frozen=True)
class Places:
    """Where blocks lie in the arena.

    `offsets` in bytes by tensor and by the position in the schedule that allocates it. `outside_bytes` is the most that
    is live outside the arena at any time, and `retained_bytes` how much of that is there between forward and backward,
    without persistent tensors.
    """

    offsets: dict[tuple[int, int], int]
    arena_bytes: int
    outside_bytes: int
    retained_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes needed of the device: the arena, which always stays, and the rest."""
        return self.arena_bytes + self.outside_bytes


NOWHERE = Places({}, 0, 0)


class Arena(NamedTuple):
    """The `places` of a step's buffers, and a function that gives their memory."""

    places: Places = NOWHERE
    take: Callable[[], Tensor] | None = None


def places_of(captured: Captured, schedule: Schedule, solver: Solver, limits: Limits) -> Places:
    """Addresses of the program's buffers under `schedule`.

    The solver's layout is checked before it is used. Raises RequestError where it has none.
    """
    allocations = list(_allocations(captured, schedule))
    wanted = {(captured.graph.tensors[tensor].name, at): (tensor, at) for tensor, at in allocations}
    inside: list[Block] = []
    outside: list[Block] = []
    keys: list[tuple[int, int]] = []
    # Blocks that the program allocates go into the arena; others stay outside.
    for block in trace_of(captured.graph, schedule).blocks:
        if (key := wanted.get((block.name, block.start))) is None:
            outside.append(replace(block, id=len(outside)))
        else:
            inside.append(replace(block, id=len(inside), alignment=ALIGNMENT))
            keys.append(key)
    layout = solver.solve(Trace(tuple(inside)), limits).layout
    if layout is None:
        raise RequestError(f"the solver {solver.name!r} found no layout within its time")
    beside = Trace(tuple(outside)).lower_bound_bytes
    retained = retained_bytes(captured.graph, schedule, besides=_allocated(captured) & {t for t, _ in allocations})
    return Places(dict(zip(keys, layout.offsets, strict=True)), layout.peak_bytes, beside, retained)


def _allocations(captured: Captured, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Each allocation of a buffer of the program: tensor, and position in the schedule."""
    graph = captured.graph
    own, allocated = _own(captured), _allocated(captured)
    here: set[int] = set()
    # A tensor is allocated where it is made or prefetched, and not there yet.
    for position, instruction in enumerate(schedule.instructions):
        target = instruction.target
        made: tuple[int, ...] = ()
        if instruction.verb is Verb.FREE:
            here.discard(target)
        elif instruction.verb is Verb.PREFETCH and target in own:
            made = (target,)
        elif instruction.verb in (Verb.RUN, Verb.RECOMPUTE):
            made = tuple(t for t in graph.ops[target].writes if t in allocated)
        yield from ((t, position) for t in made if t not in here and graph.tensors[t].nbytes)
        here.update(made)


def _own(captured: Captured) -> dict[int, fx.Node]:
    """Tensors of the step alone that have one root, with that node."""
    others = captured.handed_out() | {t.id for t in captured.graph.tensors if t.persistent}
    roots = {t: captured.joint.roots.get(key, []) for key, t in captured.tensor_of.items()}
    return {t: of[0] for t, of in roots.items() if len(of) == 1 and t not in others}


def _allocated(captured: Captured) -> set[int]:
    """Own tensors whose memory the program itself allocates."""
    return {tensor for tensor, root in _own(captured).items() if allocated_as(root)}


def plan_in_arena(
    captured: Captured, make: Callable[[int], Plan], budget_bytes: int, solver: Solver, limits: Limits
) -> tuple[Plan, Places]:
    """A plan from `make` whose arena and other bytes fit in `budget_bytes`.

    With its places. Raises InfeasibleBudget, with the least that was found.
    """
    asked, least = budget_bytes, None
    for left in reversed(range(REPLANS)):
        try:
            plan, is_least = make(max(1, asked)), False
        except InfeasibleBudget as error:
            plan, is_least = make(error.floor_bytes), True
        # Solve for addresses: if they fit, done; else plan again within fewer bytes.
        places = places_of(captured, plan.schedule, solver, limits)
        if places.total_bytes <= budget_bytes:
            kept = places.arena_bytes + places.retained_bytes
            return replace(plan, budget_bytes=budget_bytes, peak_bytes=places.total_bytes, retained_bytes=kept), places
        least = min(places.total_bytes, least or places.total_bytes)
        if is_least:
            break
        less = min(asked, plan.peak_bytes) - (places.total_bytes - budget_bytes)
        asked = less if left > 1 else 1  # the last to try is what has the least live bytes
    # None fits: name the smallest that was found.
    assert least is not None
    budget, taken = format_apart(budget_bytes, least)
    raise InfeasibleBudget(
        f"infeasible: with planned addresses the buffers of no plan lie within {budget}; the least that one took is {taken}",
        budget_bytes=budget_bytes,
        floor_bytes=least,
        cause="an arena that stays until the end of backward",
    )


_OURS = 2
"""References to an arena's storage that no call uses: ours, and the caller's."""


class Arenas:
    """The arenas of a session's calls.

    An unused one stays for the next call of the same size.
    """

    def __init__(self) -> None:
        self._memories: list[Tensor] = []
        self._lock = ForkedLock()

    def taker(self, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        """A function that lowered graphs call for their arena.

        It needs the session to be alive.
        """
        ours = weakref.ref(self)

        def take_arena() -> Tensor:
            arenas = ours()
            assert arenas is not None  # while a model of the session is called
            return arenas.take(nbytes, device)

        return take_arena

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """The memory for one call, in use as long as the tensor lives."""
        with self._lock.lock:
            self._give_back(nbytes)
            idle = (m for m in self._memories if not _is_taken(m) and m.device == device)
            if (found := next(idle, None)) is None:
                found = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._memories.append(found)
            return found.view(-1)

    def give_back(self) -> None:
        """Free unused arenas before a graph runs whose plan has none."""
        if self._memories:
            with self._lock.lock:
                self._give_back(0)

    def _give_back(self, besides: int) -> None:
        """Free unused arenas, but for one of `besides` bytes.

        The plan of the graph that runs next counts that one.
        """
        idle = [m for m in self._memories if not _is_taken(m)]
        kept = next((m for m in idle if m.nbytes == besides), None)
        self._memories = [m for m in self._memories if m is kept or _is_taken(m)]


def _is_taken(memory: Tensor) -> bool:
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata) > _OURS


def storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage for bytes at `offset` of the arena, kept alive by the caller."""
    at = arena.data_ptr() + offset
    found: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(at, arena.device, nbytes)
    return found


def tensor_at(
    arena: Tensor, offset: int, nbytes: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor at `offset` of the arena."""
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage_at(arena, offset, nbytes), 0, size, stride)
