"""The GPU memory that a plan needs: context, libraries, and PyTorch's segments.

A budget on CUDA is the size of a GPU's memory (a card) on which the job survives. A plan counts live bytes. The memory
that the caching allocator takes from the device for them is simulated, over the first steps of a run and by the rules
of its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from overspill.core import Graph, Phase
from overspill.core.errors import Amount, InfeasibleBudgetError
from overspill.core.units import format_apart, format_bytes
from overspill.costs.library_ops import CONVOLUTIONS, MATRIX_PRODUCTS
from overspill.plans.account import Account
from overspill.plans.fit import may_leave
from overspill.plans.plan import NO_LIMIT_BYTES, Plan, make_plan
from overspill.policies.in_core import Liveness

from .allocators.caching import CachingAllocator
from .allocators.caching_config import CachingConfig
from .allocators.planned import CALLED, LIVE, PlannedAllocator, PlannedConfig
from .arena import in_arena
from .card_events import STEPS, events_of
from .events import Events
from .packing import DEFAULT, SOLVERS, solver_named
from .place import SEARCH, place_plan
from .replay import replay, replay_in_steps
from .simulated_device import PAGE_BYTES, round_up

STEPS_EXPANDING = 12
"""Steps simulated with expandable segments.

These grow in later steps too, ever more rarely: for GPT-2, not beyond the twelfth.
"""
STEPS_PLANNED, STEPS_LEARNING = 6, 4
"""Steps simulated with planned addresses, and those of them in which idle pages may be given back: the profile."""
SHARES = (0.0, 0.5, 1.0)
"""The shares to try of the likely workspaces of convolutions."""
TIE_BREAKS: tuple[Literal["address", "oldest", "falling"], ...] = ("address", "oldest", "falling")
"""The orders to try among equal free blocks."""
ARENA_GRAIN_BYTES = 1 << 20
"""An arena that ends between two multiples of this costs the same: the allocator's segments are multiples of 2 MiB, and
blocks are small up to 1 MiB."""
QUICK = PlannedConfig(thorough=False)
"""Plans that may take more than under a running job, for a card that is searched for."""
LIVE_GRAIN = 1024
"""The share of the requested bytes to which the memory is found on which that allocator survives."""
LIKELY_GRAINS = 7
"""How many such shares are tried first."""
SPARE_BYTES = 4 << 20
"""Two small segments, for scalars and other small blocks that no plan counts."""


@dataclass(frozen=True)
class PoolAccount(Account):
    """Count the bytes that an allocator or a solver takes for all blocks, on a device that is no card."""

    pool: str

    @property
    def placed_by(self) -> str:
        """The name of the allocator or solver."""
        return self.pool

    @property
    def is_steady(self) -> bool:
        """Whether a plan of fewer live bytes also takes less when it is placed: by a solver, not by an allocator."""
        return self.pool in SOLVERS

    def placed(self, plan: Plan) -> Plan:
        """Return `plan` with the bytes that its blocks take."""
        return replace(plan, reserved_bytes=place_plan(plan, self.pool).peak_bytes, pool=self.pool)


@dataclass(frozen=True)
class Card(Account):
    """Count the card that a job needs: the context, and the bytes of PyTorch's allocator in its first steps."""

    handle_bytes: tuple[int, ...] = ()
    """Bytes that libraries keep of the allocator's memory for each thread that multiplies matrices."""
    config: CachingConfig = field(default_factory=CachingConfig)
    """The settings of PyTorch's allocator."""
    solver: str | None = None
    """The solver of addresses in an arena (`arena.py`), one block of the allocator; None: no arena."""
    always: bool = True
    """Whether the arena is used in any case, or only if it is faster than the allocator alone."""
    pool: str | None = None
    """The allocator or solver that has all blocks, in place of PyTorch's."""
    is_measured: bool = False
    """Whether workspaces of libraries are measured on this GPU, and not the likeliest."""
    may_have_arena: bool = True
    """Whether an arena would do in place of the allocator, if there is none."""
    is_live: bool = False
    """Whether `overspill.allocator` has the blocks outside of an arena, at planned addresses, and not PyTorch's."""
    may_be_live: bool = False
    """Whether that allocator is tried too, where PyTorch's costs time: on a GPU that is not here."""
    likely_share: float | None = None
    """What that allocator is likely to take of a plan's live bytes: where its memory is looked for first."""

    @property
    def placed_by(self) -> str:
        """The name of the allocator or solver that places blocks."""
        usual = LIVE if self.is_live else CachingAllocator.name
        return self.pool or (self.solver if self.solver and self.always else None) or usual

    @property
    def is_steady(self) -> bool:
        """Whether a plan of fewer live bytes also takes less when it is placed: at planned addresses."""
        return self.solver is not None or self.is_live

    @property
    def is_card(self) -> bool:
        """Whether a budget is the size of the card."""
        return True

    @property
    def has_arena(self) -> bool:
        """Whether blocks are at planned addresses in one arena, or may be."""
        return self.solver is not None

    @property
    def alone(self) -> Card:
        """The same without an arena."""
        return replace(self, solver=None, may_have_arena=False)

    @property
    def alternatives(self) -> tuple[Card, ...]:
        """The account with an arena; if the user did not require one, also those without."""
        found = (self,) if self.always or self.solver is None else (self, self.alone)
        return (*found, self.in_allocator) if self.may_be_live else found

    @property
    def in_allocator(self) -> Card:
        """The same with all blocks in `overspill.allocator`."""
        return replace(self.alone, is_live=True, may_be_live=False, pool=None)

    @property
    def least(self) -> Card:
        """The alternative in which plans take the least."""
        return self.in_allocator if self.may_be_live else self

    @property
    def beginnings(self) -> tuple[bool, ...]:
        """Whether the model may begin in host memory: on the card, if that fits and the user does not say."""
        return (False, True) if self.model_on_host is None else (self.model_on_host,)

    def with_likely(self, plan: Plan) -> Card:
        """Return the same, for plans that are much like `plan`, which was placed."""
        return replace(self, likely_share=plan.taken_bytes / max(1, plan.peak_bytes)) if self.is_live else self

    def reserved_bytes(self, plan: Plan) -> int:
        """Return the most that the allocator takes from the device for `plan`, over the plan's first steps.

        `overspill.allocator` takes what there is, and gives idle pages back before memory runs out. So of it the
        memory counts on which these steps survive.

        Blocks have other addresses in four cases: cuDNN takes less workspace than is likely, if none was measured;
        kernels make their results in another order; matrices were multiplied before; or the driver gives segments at
        other addresses, by which the allocator chooses among equals. The least of these may cost one more segment of
        the largest size. So the most of several runs counts.
        """
        if self.pool is not None:
            return place_plan(plan, self.pool).peak_bytes + self._kept_bytes(plan.graph) + SPARE_BYTES
        has_elastic = not self.is_measured and any(
            op.name in CONVOLUTIONS and op.workspace_bytes for op in plan.graph.ops
        )
        steps = STEPS_EXPANDING if self.config.expandable_segments else STEPS
        if self.is_live:
            has_elastic, steps = False, STEPS_PLANNED
        found: list[int] = []
        orders = product(SHARES if has_elastic else SHARES[-1:], (False, True), (False,))
        # That first which rarely takes less than the others: on what it takes they are tried once.
        for share, backwards, used in [(SHARES[-1], False, True), *orders]:
            ends: list[int] = []
            events = events_of(
                plan.graph, plan.schedule, self.handle_bytes, share, steps, plan.groups,
                backwards=backwards, places=plan.places, used=used, model_on_host=plan.model_on_host, ends=ends,
            )  # fmt: skip
            if self.is_live:
                likely = None if self.likely_share is None else int(self.likely_share * plan.peak_bytes) - SPARE_BYTES
                found.append(_survives_on(events, ends, max(found, default=0), likely))
                continue
            for tie_break in TIE_BREAKS:
                config = replace(self.config, tie_break=tie_break)
                found.append(replay(events, "pytorch", config=config).peak_device_bytes)
        return max(found) + SPARE_BYTES

    def placed(self, plan: Plan) -> Plan:
        """Return `plan` with its blocks at addresses, and what the allocator takes for the arena and the rest."""
        if self.solver is not None:
            inside = in_arena(plan, solver_named(self.solver), SEARCH, ARENA_GRAIN_BYTES)
            plan = replace(inside, peak_bytes=plan.peak_bytes)
        return replace(plan, reserved_bytes=self.reserved_bytes(plan), pool=self.placed_by)

    def charged(self, plan: Plan, budget_bytes: int) -> Plan:
        """Return a placed plan with the card bytes of it and of the unmanaged step, for a card of `budget_bytes`."""
        return replace(
            plan,
            device_bytes=plan.taken_bytes + self.context_bytes,
            device_budget_bytes=budget_bytes,
            library_bytes=self._kept_bytes(plan.graph),
            unmanaged_device_bytes=self.unmanaged(plan.graph),
        )

    def measured(self, plan: Plan) -> Plan:
        """Return a plan with the card bytes that it needs now: placed as it was, if it was."""
        alone = plan.places is None and plan.reserved_bytes is not None
        account = self.in_allocator if alone and plan.pool == LIVE else self.alone if alone else self
        return self.charged(account.placed(plan), plan.asked_bytes)

    def unmanaged(self, graph: Graph) -> int:
        """Return the card bytes of a step of `graph` with nothing moved or recomputed; budgets are shares of it."""
        return self.most_unmanaged(graph) if self.estimated_bytes is None else self.estimated_bytes

    def most_unmanaged(self, graph: Graph) -> int:
        """Return the card bytes that such a step takes in the worst case; an estimate is the likeliest."""
        unmanaged = make_plan(graph, self.device, Liveness.name, NO_LIMIT_BYTES)
        return self.reserved_bytes(unmanaged) + self.context_bytes

    def _kept_bytes(self, graph: Graph) -> int:
        """Return the bytes that libraries keep for all threads that multiply matrices.

        Backward's thread is another than forward's.
        """
        threads = {op.phase is Phase.FORWARD or graph.whole_step for op in graph.ops if op.name in MATRIX_PRODUCTS}
        return len(threads) * sum(self.handle_bytes)

    def refusal(self, budget_bytes: int, least: Plan, fewest: Plan, cause: str) -> InfeasibleBudgetError:
        """Return the error for a card that is too small for the plan `least`; see `Account.refusal`."""
        floor_bytes, live_bytes = least.taken_bytes + self.context_bytes, least.peak_bytes
        pool = f"the allocator {self.pool}" if self.pool else CALLED if self.is_live else "PyTorch's allocator"
        needed, budget = format_apart(floor_bytes, budget_bytes)
        at_least = "" if least is fewest else f"at least {format_bytes(fewest.peak_bytes)}"
        # Settings that would need a smaller card.
        changes = self._changes(fewest, least.taken_bytes)
        instead = ", ".join(f"with {change.what} {format_bytes(change.nbytes)} would do" for change in changes)
        return InfeasibleBudgetError(
            f"infeasible: a card of {budget} is too small; {needed} are needed: {format_bytes(self.context_bytes)} for "
            "the "
            f"context and {format_bytes(least.taken_bytes)} in {pool}, for "
            f"{format_bytes(live_bytes)} of live bytes "
            f"({at_least}{at_least and ': '}{cause}){'' if self.pool else ', library workspaces'} and fragmentation; "
            f"raise the budget or make the batch smaller{instead and '; '}{instead}",
            budget_bytes=budget_bytes,
            floor_bytes=floor_bytes,
            cause=f"{at_least} of live tensors: {cause}" if at_least else cause,
            parts=(
                Amount("context", self.context_bytes),
                Amount(f"reserved by {pool}", least.taken_bytes),
                Amount("of that live tensors", live_bytes),
            ),
            changes=changes,
            crowded=fewest.peak_bytes + self.context_bytes <= budget_bytes,
            most_bytes=least.device.memory_bytes,
        )

    def _changes(self, plan: Plan, reserved_bytes: int) -> tuple[Amount, ...]:
        """Return settings with which `plan` needs a smaller card, and its bytes; the smallest card first.

        They take less than `reserved_bytes` of the allocator.
        """
        found: list[tuple[Card, Plan, str]] = []
        if not plan.model_on_host and may_leave(plan.graph):
            found.append((self, replace(plan, places=None, model_on_host=True), 'the model on the CPU, device="cuda",'))
        if self.pool is None and not self.is_live:
            found.append((self.in_allocator, replace(plan, places=None), CALLED))
        if self.solver is None and self.pool is None and not self.is_live:
            if self.may_have_arena:
                found.append((replace(self, solver=DEFAULT, config=CachingConfig()), plan, 'placement="planned"'))
            if not self.config.expandable_segments:
                expanding = replace(self.config, expandable_segments=True, max_split_bytes=None)
                setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                found.append((replace(self, config=expanding), plan, setting))
        taken = sorted((other.placed(one).taken_bytes, what) for other, one, what in found)
        return tuple(Amount(what, nbytes + self.context_bytes) for nbytes, what in taken if nbytes < reserved_bytes)


def _survives_on(events: Events, ends: Sequence[int], at_least: int, likely: int | None) -> int:
    """Return the memory, found upwards from `at_least`, on which `overspill.allocator` serves steps with these `ends`.

    It gives idle pages back in the first STEPS_LEARNING alone. Near `likely` bytes it is looked for first.
    """
    requested = max(at_least, round_up(events.peak_requested_bytes, PAGE_BYTES))
    grain = round_up(requested // LIVE_GRAIN, PAGE_BYTES)

    def survives(grains: int) -> bool:
        allocator = PlannedAllocator(QUICK, capacity_bytes=requested + grains * grain)
        retries = replay_in_steps(allocator, events, ends)
        return retries is not None and len({*retries[STEPS_LEARNING - 1 :]}) == 1

    enough, step = (0, 1) if at_least else (LIKELY_GRAINS, LIKELY_GRAINS + 1)
    if likely is not None and not at_least and (likely - requested) // grain > LIKELY_GRAINS:
        enough, step = (likely - requested) // grain, 1
    # Outwards in growing steps, then by bisection.
    too_few = -1
    while not survives(enough):
        too_few, enough, step = enough, enough + step, 2 * step
    while too_few < 0 <= enough - step:
        if survives(enough - step):
            enough, step = enough - step, 2 * step
        else:
            too_few = enough - step
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if survives(middle) else (middle, enough)
    return requested + enough * grain
