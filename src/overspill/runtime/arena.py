"""Planned addresses for compiled programs: each buffer lies in one arena where a solver has put it.

Every buffer that a program allocates, and every tensor that comes back from the store, is a block with the time that the
schedule gives it, forward and backward together. What leaves the step (outputs, gradients) is not, for its owner says
how long it lives, and neither is what library calls allocate for themselves.

Names private to PyTorch that this file relies on (2.11 to 2.13): `torch._C._construct_storage_from_data_pointer`, so that
each buffer has a storage of its own, and `torch._C._storage_Use_Count`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from overspill.capture.programs.graph import CapturedPrograms
from overspill.core import Block, Schedule, Trace, Verb
from overspill.core.errors import InfeasibleBudget, UnsupportedError
from overspill.core.units import format_apart
from overspill.placement.packing import Limits, Solver
from overspill.plans.plan import Plan
from overspill.simulate import trace_of

ALIGNMENT = 64
"""Bytes that addresses are multiples of, as those of PyTorch's CPU allocator."""
REPLANS = 8
"""How often a plan that does not lie within its budget is made again for less."""


@dataclass(frozen=True)
class Places:
    """Where blocks lie in the arena: `offsets` in bytes by tensor and by the position in the schedule that allocates it.

    `outside_bytes` is the most that is live besides at any time.
    """

    offsets: dict[tuple[int, int], int]
    arena_bytes: int
    outside_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the device has to have: the arena stays from step to step."""
        return self.arena_bytes + self.outside_bytes


NOWHERE = Places({}, 0, 0)


def places_of(captured: CapturedPrograms, schedule: Schedule, solver: Solver, limits: Limits) -> Places:
    """The places of the program's buffers under `schedule`; the solver's layout is checked before it is used."""
    wanted = {
        (captured.graph.tensors[tensor].name, at): (tensor, at) for tensor, at in _allocations(captured, schedule)
    }
    inside: list[Block] = []
    outside: list[Block] = []
    keys: list[tuple[int, int]] = []
    for block in trace_of(captured.graph, schedule).blocks:
        if (key := wanted.get((block.name, block.start))) is None:
            outside.append(block)
        else:
            inside.append(replace(block, id=len(inside), alignment=ALIGNMENT))
            keys.append(key)
    beside = Trace(tuple(replace(b, id=i) for i, b in zip(count(), outside))).lower_bound_bytes
    solution = solver.solve(Trace(tuple(inside)), limits)
    if solution.layout is None:
        return Places({}, 0, beside)
    return Places(dict(zip(keys, solution.layout.offsets, strict=True)), solution.layout.peak_bytes, beside)


def _allocations(captured: CapturedPrograms, schedule: Schedule) -> list[tuple[int, int]]:
    """Each time that a buffer of the program comes to the device: the tensor, and the position in the schedule."""
    graph, programs = captured.graph, captured.programs
    leaving = {captured.key_of.get(t) for t in graph.outputs}
    for value in (*programs.outputs[0][: programs.num_forward_outputs], *programs.outputs[1]):
        if isinstance(value, Tensor):
            leaving.add(int(value.untyped_storage()._cdata))
    own = {
        tensor for tensor, key in captured.key_of.items()
        if key not in leaving and not graph.tensors[tensor].persistent and len(programs.roots[key]) == 1
    }  # fmt: skip
    allocated = {t for t in own if programs.roots[captured.key_of[t]][0] in programs.allocations}
    here: set[int] = set()
    found: list[tuple[int, int]] = []
    for position, instruction in enumerate(schedule.instructions):
        target = instruction.target
        made: tuple[int, ...] = ()
        if instruction.verb is Verb.FREE:
            here.discard(target)
        elif instruction.verb is Verb.PREFETCH and target in own:
            made = (target,)
        elif instruction.verb in (Verb.RUN, Verb.RECOMPUTE):
            made = tuple(t for t in graph.ops[target].writes if t in allocated)
        found += [(t, position) for t in made if t not in here and graph.tensors[t].nbytes]
        here.update(made)
    return found


def plan_in_arena(
    captured: CapturedPrograms, make: Callable[[int], Plan], budget_bytes: int, solver: Solver, limits: Limits
) -> tuple[Plan, Places]:
    """A plan that `make` gives for some budget, and its places, which together with the rest fit in `budget_bytes`.

    Raises InfeasibleBudget, with the least that was found.
    """
    asked, least = budget_bytes, None
    for _ in range(REPLANS):
        least_is_tried = False
        try:
            plan = make(max(1, asked))
        except InfeasibleBudget as error:
            least_is_tried = True
            plan = make(error.floor_bytes)
        places = places_of(captured, plan.schedule, solver, limits)
        if places.total_bytes <= budget_bytes:
            return replace(plan, budget_bytes=budget_bytes), places
        least = min(places.total_bytes, least or places.total_bytes)
        less = min(asked, plan.peak_bytes) - (places.total_bytes - budget_bytes)
        if least_is_tried:
            break
        asked = less
    assert least is not None
    budget, taken = format_apart(budget_bytes, least)
    raise InfeasibleBudget(
        f"infeasible: with planned addresses the buffers of no plan lie within {budget}; the least that one took is {taken}",
        budget_bytes=budget_bytes,
        floor_bytes=least,
        cause="an arena that stays from step to step",
    )


_OURS = 2
"""References to an arena's storage that nobody waits with: ours, and that of who asks."""


class Arena:
    """The memory that the buffers of a program lie in, from step to step."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._memory: Tensor | None = None

    def take(self) -> Tensor:
        """The memory for one call, which has it as long as it holds this tensor.

        Raises UnsupportedError where another call has it.
        """
        if self._memory is None:
            self._memory = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=self.device)
        elif torch._C._storage_Use_Count(self._memory.untyped_storage()._cdata) > _OURS:
            raise UnsupportedError(
                "the model is called while another call of it waits for its backward, and planned addresses are there once; "
                'leave placement="planned" out, or call the model under torch.no_grad() where no backward follows'
            )
        return self._memory.view(-1)


def storage_at(arena: Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage of its own for the bytes at `offset` of the arena, whoever uses it keeps the arena."""
    start = arena.data_ptr()
    start += -start % ALIGNMENT
    found: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(start + offset, arena.device, nbytes)
    return found


def tensor_at(
    arena: Tensor, offset: int, nbytes: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A buffer at `offset` of the arena."""
    return torch.empty(0, dtype=dtype, device=arena.device).set_(storage_at(arena, offset, nbytes), 0, size, stride)
