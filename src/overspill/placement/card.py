"""The card that a plan needs: context, libraries, and PyTorch's segments.

A budget on CUDA is the size of a card on which the job survives. A plan counts live bytes; what the caching allocator
takes from the device for them is simulated, over the first steps of a run and by the rules of its settings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Literal, TypeVar

from overspill.core import Device, Graph, Phase
from overspill.core.errors import Amount, InfeasibleBudget
from overspill.core.units import format_apart, format_bytes
from overspill.planning.effort import at_effort
from overspill.plans.plan import NO_LIMIT_BYTES, Plan, make_plan
from overspill.policies.in_core import Liveness

from .allocators.caching import CachingAllocator
from .allocators.caching_config import CachingConfig
from .arena import NEAR, in_arena, plan_in_arena
from .card_events import ELASTIC, MATRIX_PRODUCTS, STEPS, events_of, there_before
from .card_search import FIRST_EFFORT, CardSearch, Tried, on_grid
from .packing import DEFAULT, solver_named
from .place import SEARCH, place_plan
from .replay import replay

T = TypeVar("T")
STEPS_EXPANDING = 12
"""Steps simulated with expandable segments, which grow in later steps too, ever more rarely: for GPT-2, not beyond the twelfth."""
SHARES = (0.0, 0.5, 1.0)
"""Shares of the likely workspaces of ELASTIC ops that are tried."""
TIE_BREAKS: tuple[Literal["address", "oldest", "falling"], ...] = ("address", "oldest", "falling")
"""Orders among equal free blocks that are tried."""
LOOSE = 1.05
"""Share of its live bytes that a plan in an arena may take before the caching allocator is tried too, if it is not NEAR."""
GAIN = 1.01
"""Nor where the step takes so many times as long as with all the room for live bytes: no allocator gives more."""
ARENA_GRAIN_BYTES = 1 << 20
"""An arena that ends between two multiples of this costs the same: the allocator's segments are multiples of 2 MiB, and
blocks are small up to 1 MiB."""
SPARE_BYTES = 4 << 20
"""Two small segments, for scalars and other small blocks that no plan counts."""


class TooSlow(Exception):
    """A card's plan is slower than is worth it, even if live bytes had all the room: `hoped` is that one, `planned` plans on.

    `hoped` is None where there is no such plan, and so none at all.
    """

    def __init__(self, hoped: Plan | None, planned: Callable[[], tuple[object, Plan]]) -> None:
        super().__init__()
        self.hoped, self.planned = hoped, planned


@dataclass(frozen=True)
class Card:
    """A card as a job meets it.

    `context_bytes` are the driver's and those of loaded kernels, `handle_bytes` what the libraries keep of the
    allocator's memory for each thread that multiplies matrices, `config` are the allocator's settings. With a `solver`
    blocks lie in an arena (`arena.py`), and the allocator has it and the rest: `always`, or where that is faster than the
    allocator alone. With a `pool` all lie in an allocator of a paper, apart from PyTorch's. Workspaces of libraries are measured on the GPU, where `is_measured`, or what is likely.
    `estimated_bytes` are those of the unmanaged job, where it was estimated.
    """

    context_bytes: int
    handle_bytes: tuple[int, ...] = ()
    config: CachingConfig = field(default_factory=CachingConfig)
    solver: str | None = None
    always: bool = True
    pool: str | None = None
    is_measured: bool = False
    estimated_bytes: int | None = None

    @property
    def lies_in(self) -> str:
        """The name of the allocator or solver that places blocks."""
        return self.pool or (self.solver if self.solver and self.always else None) or CachingAllocator.name

    def reserved_bytes(self, plan: Plan) -> int:
        """The most that PyTorch's allocator takes from the device for `plan`.

        Over the plan's first steps. Blocks lie elsewhere where cuDNN takes less workspace than is likely, if none was measured, where kernels
        make their results in another order, where matrices were multiplied before, and where the driver gives segments at other addresses, by which the
        allocator chooses among equals. The least of that may cost one more segment of the largest size. So the most
        over several ways counts.
        """
        if self.pool is not None:
            return place_plan(plan, self.pool).peak_bytes
        has_elastic = not self.is_measured and any(op.name in ELASTIC and op.workspace_bytes for op in plan.graph.ops)
        steps = STEPS_EXPANDING if self.config.expandable_segments else STEPS
        found = []
        orders = product(SHARES if has_elastic else SHARES[-1:], (False, True), (False,))
        for share, backwards, used in [*orders, (SHARES[-1], False, True)]:
            events = events_of(
                plan.graph, plan.schedule, self.handle_bytes, share, steps, plan.groups,
                backwards=backwards, places=plan.places, used=used,
            )  # fmt: skip
            for tie_break in TIE_BREAKS:
                config = replace(self.config, tie_break=tie_break)
                found.append(replay(events, "pytorch", config=config).peak_device_bytes)
        return max(found) + SPARE_BYTES

    def placed(self, plan: Plan) -> Plan:
        """`plan` with its blocks at addresses, and what the allocator takes for the arena and the rest."""
        if self.solver is not None:
            inside = in_arena(plan, solver_named(self.solver), SEARCH, ARENA_GRAIN_BYTES)
            plan = replace(inside, peak_bytes=plan.peak_bytes)
        return replace(plan, reserved_bytes=self.reserved_bytes(plan))

    def measured(self, plan: Plan) -> Plan:
        """`plan` with the card bytes that it and the unmanaged step need."""
        unmanaged = self.unmanaged_bytes(plan.graph, plan.device)
        alone = plan.places is None and plan.reserved_bytes is not None
        plan = (replace(self, solver=None) if alone else self).placed(plan)
        counted = self._counted(plan, plan.taken_bytes, plan.device_budget_bytes)
        return replace(counted, unmanaged_device_bytes=unmanaged, estimated_bytes=self.estimated_bytes)

    def unmanaged_bytes(self, graph: Graph, device: Device) -> int:
        """Card bytes of the step with nothing moved or recomputed.

        A relative budget is a share of this.
        """
        unmanaged = make_plan(graph, device, Liveness.name, NO_LIMIT_BYTES)
        return self.reserved_bytes(unmanaged) + self.context_bytes

    def _counted(self, plan: Plan, reserved_bytes: int, budget_bytes: int | None) -> Plan:
        """`plan` for a card of `budget_bytes`, with `reserved_bytes` of it taken."""
        return replace(
            plan,
            reserved_bytes=reserved_bytes,
            device_bytes=reserved_bytes + self.context_bytes,
            device_budget_bytes=budget_bytes,
            library_bytes=self._kept_bytes(plan.graph),
        )

    def _kept_bytes(self, graph: Graph) -> int:
        """Bytes that libraries keep for all threads that multiply matrices.

        Backward's thread is another than forward's.
        """
        if self.pool:
            return 0
        threads = {op.phase is Phase.FORWARD or graph.whole_step for op in graph.ops if op.name in MATRIX_PRODUCTS}
        return len(threads) * sum(self.handle_bytes)

    def planned(
        self, budget_bytes: int, make: Callable[[int], tuple[T, Plan]], worth: float = math.inf
    ) -> tuple[T, Plan]:
        """The answer of `make` for the live bytes that fit on the card.

        The card has `budget_bytes`; the plan knows it. Of several plans that fit the fastest counts (`card_search.py`).
        Raises InfeasibleBudget with the size of a card that would do, and TooSlow at once where the slowdown is above
        `worth`, or there is no plan, even if live bytes had all the room.
        """
        begun = time.perf_counter()
        room = budget_bytes - self.context_bytes

        @cache  # all searches share its plans
        def made(live_bytes: int, effort: float = 1.0) -> tuple[T, Plan]:
            with at_effort(effort):
                return make(live_bytes)

        first = self._first(room, made)

        def planned() -> tuple[T, Plan]:
            answer, plan = self._planned(budget_bytes, room, made, first)
            took = time.perf_counter() - begun  # with all the plans that were made for it
            return answer, replace(plan, plan_seconds=took)

        if not self.pool and worth < (math.inf if first is None else first.slowdown):
            raise TooSlow(first, planned)
        return planned()

    def _planned(
        self, budget_bytes: int, room: int, made: Callable[[int, float], tuple[T, Plan]], first: Plan | None
    ) -> tuple[T, Plan]:
        # All of the model is on the device before the first step. Where there is no first plan, the search finds out why.
        may_fit = first is None or sum(t.nbytes for t in there_before(first.graph)) <= room
        ways = [self] if self.always or self.solver is None else [self, replace(self, solver=None)]
        searches = [CardSearch(room, made, way.placed) for way in ways]
        found = self._fastest(room, made, searches[-1], first) if may_fit else None
        if found is None:
            floors = (search.from_floor(alone=not may_fit) for search in searches)
            least, fewest, cause = min(floors, key=lambda floor: floor[0].plan.taken_bytes)
            if least.plan.taken_bytes > room:
                raise _too_small(self, budget_bytes, least, fewest, cause)
            found = least
        plan = self._counted(found.plan, found.plan.taken_bytes, budget_bytes)
        unmanaged = self.unmanaged_bytes(plan.graph, plan.device)
        return found.answer, replace(plan, unmanaged_device_bytes=unmanaged, estimated_bytes=self.estimated_bytes)

    def _first(self, room_bytes: int, make: Callable[[int, float], tuple[T, Plan]]) -> Plan | None:
        """The plan that the search begins with, so that nothing is planned twice, or None."""
        if self.pool:
            return None
        try:
            return make(max(1, room_bytes) if self.solver else on_grid(room_bytes), FIRST_EFFORT)[1]
        except InfeasibleBudget:
            return None

    def _fastest(
        self, room_bytes: int, make: Callable[[int, float], tuple[T, Plan]], search: CardSearch[T], first: Plan | None
    ) -> Tried[T] | None:
        """The fastest plan found that fits, or None.

        `search` is for one in the caching allocator alone, `first` is what live bytes with all the room would take.
        """
        if self.solver is None:
            return search.fastest()
        inside = Tried(*plan_in_arena(make, room_bytes, self.placed))
        fits = inside.plan.taken_bytes <= room_bytes
        tight = inside.plan.taken_bytes <= LOOSE * inside.plan.peak_bytes or inside.plan.slowdown <= NEAR
        tight |= first is not None and inside.plan.step_seconds <= GAIN * first.step_seconds
        if self.always or (fits and tight):
            return inside if fits else None
        # Much lies beside the arena, as the results of convolutions do: it may cost more than it is worth.
        found = [tried for tried in (inside if fits else None, search.fastest()) if tried is not None]
        return min(found, key=lambda tried: tried.plan.step_seconds, default=None)


def _too_small(card: Card, budget_bytes: int, least: Tried[T], fewest: Tried[T], cause: str) -> InfeasibleBudget:
    """The error for a card without room for the plan `least`.

    The card has `budget_bytes`; `fewest` is the plan with the fewest live bytes.
    """
    floor_bytes, live_bytes = least.plan.taken_bytes + card.context_bytes, least.plan.peak_bytes
    pool = f"the allocator {card.pool}" if card.pool else "PyTorch's allocator"
    needed, budget = format_apart(floor_bytes, budget_bytes)
    at_least = "" if least is fewest else f"at least {format_bytes(fewest.plan.peak_bytes)}"
    # Settings that would need a smaller card.
    changes = _changes(card, fewest.plan, least.plan.taken_bytes)
    instead = ", ".join(f"with {change.what} {format_bytes(change.nbytes)} would do" for change in changes)
    return InfeasibleBudget(
        f"infeasible: a card of {budget} is too small; {needed} are needed: {format_bytes(card.context_bytes)} for the "
        f"context and {format_bytes(least.plan.taken_bytes)} in {pool}, for "
        f"{format_bytes(live_bytes)} of live bytes ({at_least}{at_least and ': '}{cause}){'' if card.pool else ', library workspaces'} and fragmentation; "
        f"raise the budget or make the batch smaller{instead and '; '}{instead}",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        cause=f"{at_least} of live tensors: {cause}" if at_least else cause,
        parts=(
            Amount("context", card.context_bytes),
            Amount(f"reserved by {pool}", least.plan.taken_bytes),
            Amount("of that live tensors", live_bytes),
        ),
        changes=changes,
        crowded=fewest.plan.peak_bytes + card.context_bytes <= budget_bytes,
        most_bytes=least.plan.device.memory_bytes,
    )


def _changes(card: Card, plan: Plan, reserved_bytes: int) -> tuple[Amount, ...]:
    """Settings with which `plan` needs a smaller card, and its bytes.

    Less than `reserved_bytes` in the allocator; the smallest card first.
    """
    if card.solver is not None or card.pool is not None:
        return ()
    ways = [(replace(card, solver=DEFAULT, config=CachingConfig()), 'placement="planned"')]
    if not card.config.expandable_segments:
        expanding = replace(card.config, expandable_segments=True, max_split_bytes=None)
        ways.append((replace(card, config=expanding), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    found = sorted((other.placed(plan).taken_bytes, what) for other, what in ways)
    return tuple(Amount(what, nbytes + card.context_bytes) for nbytes, what in found if nbytes < reserved_bytes)
