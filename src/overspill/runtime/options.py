"""What the user asked for, and what follows from it: the device, the budget in bytes, the plan, the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from overspill.capture.compiled.graph import REST, UPDATE
from overspill.core import Device, Graph, Verb
from overspill.core.budget import Budget
from overspill.core.device import ELSEWHERE
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.core.units import format_apart, parse_bytes
from overspill.costs import MeasuredTimes
from overspill.costs.scratch import Software
from overspill.devices import load_device
from overspill.placement.allocators.caching import CachingAllocator
from overspill.placement.arena import in_arena, plan_in_arena
from overspill.placement.card import Card
from overspill.placement.packing import DEFAULT, solver_named
from overspill.placement.place import SEARCH, check_placer, place_plan, plan_within
from overspill.planning.effort import at_effort
from overspill.plans.comparison import Best, Comparison, compare
from overspill.plans.plan import Plan, make_plan, smallest_budget, unmanaged_peak
from overspill.plans.sweep import Sweep, sweep
from overspill.policies import Policy, policy_named

from .hardware import card_bytes, card_of, device_noun, usable_bytes
from .transfer.engine import TransferEngine, make_engine
from .transfer.ops import register_engine
from .transfer.stores import STORES, make_store, whole_pages

T = TypeVar("T")
BACKENDS = ("eager", "inductor")
ON_UNPLANNED = ("error", "warn")
"""What is done where a call runs without a plan."""
PLANNED, PYTORCH, OWN = "planned", CachingAllocator.name, "own"
"""Placements: addresses in an arena, the default on CUDA; PyTorch's caching allocator alone; and that of a policy's paper."""


@dataclass(frozen=True)
class Options:
    """What the user asked for. `budget` is a size, a share of what the step takes unmanaged, `smallest`, or None for all
    of the device's memory.

    `reserve` is set aside for what runs between the model's forward and backward (a loss outside the model, say);
    None means twice the size of the model's differentiable outputs. `times` are op times measured before,
    `profile=True` measures them (on the eager backend). `placement` names the allocator or solver within whose peak a
    plan has to stay, or is `planned`, or `own`, that of the policy's paper; without it live bytes count. `on_unplanned` says whether a call that runs without a
    plan is an error or a warning. `partition` is the `activation_memory_budget` (0 to 1) by which Inductor's forward and
    backward are parted; None: the best of several. `software` is that of a GPU that is not here. With
    `whole_step` the update of a job is part of its plan, as in `overspill.train_step`. `estimated_bytes` are what the job is estimated to take of
    a GPU unmanaged. `limit` is the budget,
    parsed.
    """

    budget: str | float | Budget | None = None
    policy: str | Policy = "auto"
    store: str | None = None
    store_dir: str | Path | None = None
    backend: str = "eager"
    device: str | Device | None = None
    reserve: str | float | None = None
    times: MeasuredTimes | None = None
    profile: bool = False
    placement: str | None = None
    checksum: bool = False
    on_unplanned: str = "error"
    partition: float | None = None
    software: Software | None = None
    whole_step: bool = False
    estimated_bytes: int | None = None
    limit: Budget = field(init=False)

    def __post_init__(self) -> None:
        """Refuse at once what could only fail later."""
        policy_named(self.policy)
        object.__setattr__(self, "limit", Budget.parse(self.budget))
        if self.reserve is not None:
            parse_bytes(self.reserve)
        if self.on_unplanned not in ON_UNPLANNED:
            raise RequestError(f"on_unplanned={self.on_unplanned!r}: it is {' or '.join(map(repr, ON_UNPLANNED))}")
        if self.store is not None:
            STORES.named(self.store)
        if self.backend not in BACKENDS:
            raise RequestError(f"unknown backend {self.backend!r}; backends: {', '.join(BACKENDS)}")
        if self.profile and self.backend != "eager":
            raise RequestError("op times are measured on the eager backend; Inductor fuses ops")
        if self.partition is not None and self.backend != "inductor":
            raise RequestError("a partition is for Inductor's programs; give backend='inductor' with it")
        if self.partition is not None and not 0 <= self.partition <= 1:
            raise RequestError(f"partition={self.partition} is no activation_memory_budget, which goes from 0 to 1")
        if self.placer is not None:
            check_placer(self.placer, PLANNED, OWN)

    def check_unset(self) -> None:
        """Of who gives a session nothing else may be asked. Raises RequestError."""
        if self != Options():
            raise RequestError("a session has its own budget, policy and store; give these to overspill.Session")

    @property
    def in_pieces(self) -> bool:
        """Whether large row-wise chains may be planned in pieces of rows."""
        return policy_named(self.policy).in_pieces

    @property
    def placer(self) -> str | None:
        """The allocator or solver that plans are placed by, in place of a placement with real addresses."""
        if self.placement == OWN:
            return policy_named(self.policy).placement
        return DEFAULT if self.placement == PLANNED else self.placement


def device_for(options: Options, where: torch.device) -> Device:
    """The device to plan for: the one that was asked for, or the one that tensors are on."""
    if isinstance(options.device, Device):
        return options.device
    return load_device(options.device) if options.device is not None else device_noun(where)


def budget_for(
    options: Options, graph: Graph, device: Device, where: torch.device, plan: Callable[[int], Plan] | None = None
) -> int:
    """The budget in bytes: what was asked for, as a size, as a share of what the step takes unmanaged, as the floor, or the whole device."""
    if not options.limit.is_relative:
        return fixed_budget(options, device, where)
    budget_bytes = options.limit.bytes_of(
        lambda: unmanaged_bytes(options, graph, device),
        0,
        lambda: smallest_budget(plan or (lambda nbytes: plan_graph(options, graph, device, nbytes))),
    )
    # Of a GPU that is not here a share may be more than it has: then the plan says so.
    is_here = device.index not in (None, ELSEWHERE)
    return min(budget_bytes, card_bytes(device)) if is_here and is_of_card(options, device) else budget_bytes


def unmanaged_bytes(options: Options, graph: Graph, device: Device) -> int:
    """What the step takes with nothing moved or recomputed, counted as budgets are: live bytes, or the card that it needs."""
    if is_of_card(options, device):
        return card_for(options, device).unmanaged_bytes(graph, device)
    return unmanaged_peak(graph, device)


def fixed_budget(options: Options, device: Device, where: torch.device) -> int:
    """The budget in bytes that does not follow from a step: a size, or the whole device; of a card no more than it can give."""
    if is_of_card(options, device):
        if (asked := options.limit.nbytes or 0) > device.memory_bytes:
            budget, has = format_apart(asked, device.memory_bytes)
            raise RequestError(
                f"budget={budget} is more than the {has} of {device.name}; leave it out for all of the card, or name a larger GPU"
            )
        return min(asked or device.memory_bytes, card_bytes(device))
    return options.limit.nbytes or (device.usable_bytes if options.device else usable_bytes(where))


def is_of_card(options: Options, device: Device) -> bool:
    """Whether a budget is the size of a card, with the context and what PyTorch's allocator takes: on CUDA.

    With another allocator or solver it is that too where the GPU is not here, and here what that takes.
    """
    pytorchs = options.placer is None or options.placement in (PLANNED, PYTORCH)
    return device.index is not None and (pytorchs or device.index == ELSEWHERE)


def has_arena(options: Options, device: Device) -> bool:
    """Whether a step's blocks lie at planned addresses in one arena: where that is asked for, and else on CUDA."""
    return options.placement == PLANNED or (options.placer is None and device.index is not None)


def card_for(options: Options, device: Device) -> Card:
    """The card that plans are for. Raises UnsupportedError."""
    card = replace(card_of(device, options.software), estimated_bytes=options.estimated_bytes)
    if options.placer is not None and options.placement not in (PLANNED, PYTORCH):
        return replace(card, pool=options.placer)
    return replace(card, solver=DEFAULT if has_arena(options, device) else None, always=options.placement == PLANNED)


def within_budget(
    options: Options, device: Device, budget_bytes: int, make: Callable[[int], tuple[T, Plan]], worth: float = math.inf
) -> tuple[T, Plan]:
    """What `make` gives for the live bytes that `budget_bytes` has room for; on CUDA the plan knows its card.

    Raises InfeasibleBudget, and of a card TooSlow where its plan has a slowdown above `worth`.
    """
    if is_of_card(options, device):
        return card_for(options, device).planned(budget_bytes, make, worth)
    return make(budget_bytes)


def measured_again(options: Options, plan: Plan) -> Plan | None:
    """`plan`, whose updates were gathered after it was made, with what it takes now; None where that is over its budget."""
    if is_of_card(options, plan.device):
        made = card_for(options, plan.device).measured(plan)
        assert made.device_bytes is not None
        most = made.device_budget_bytes
        return made if most is None or made.device_bytes <= most else None
    if has_arena(options, plan.device):
        made = in_arena(plan, solver_named(), SEARCH)
        return made if made.peak_bytes <= plan.budget_bytes else None
    if options.placer is not None and place_plan(plan, options.placer).peak_bytes > plan.budget_bytes:
        return None
    return plan


def open_engine(options: Options, where: torch.device) -> tuple[TransferEngine, int]:
    """An engine with a store as asked for, for tensors on `where`, and the number by which lowered graphs call it.

    Raises RequestError and StoreError.
    """
    store = make_store(options.store, where, options.store_dir)
    engine = make_engine(store, where, checksum=options.checksum)
    return engine, register_engine(engine)


def plan_graph(options: Options, graph: Graph, device: Device, budget_bytes: int, worth: float = math.inf) -> Plan:
    """The plan of `graph` within a budget, of live bytes or of a card. Raises as `within_budget` does."""

    def make(live: int) -> tuple[None, Plan]:
        return None, plan_live(options, graph, device, live)

    return within_budget(options, device, budget_bytes, make, worth)[1]


def compare_on(
    options: Options,
    graph: Graph,
    device: Device,
    policies: Iterable[str | Policy],
    progress: Callable[[str], None] | None = None,
    best: Best | None = None,
) -> Comparison:
    """A row for each of `policies` on `graph` within the budget, of live bytes or of a card."""
    budget_bytes = budget_for(options, graph, device, torch.device("cpu"))

    def card(policy: Policy) -> Card | None:
        under = replace(options, policy=policy)
        if is_of_card(under, device):
            return card_for(under, device)
        # Of a CPU an allocator is all that there is beside it.
        return None if under.placer is None else Card(0, pool=under.placer)

    rows = compare(graph, device, policies, budget_bytes, options.times, progress, card, best)
    return Comparison(tuple(rows), device, budget_bytes)


def sweep_on(
    options: Options,
    graph: Graph,
    device: Device,
    policies: Iterable[str | Policy],
    points: int,
    progress: Callable[[str], None] | None = None,
    best: Best | None = None,
) -> Sweep:
    """What a step of `graph` costs by each of `policies` at so many budgets, of live bytes or of a card."""
    card = card_for(options, device) if is_of_card(options, device) else None
    return sweep(graph, device, policies, points, options.times, progress, card, best)


def plan_live(options: Options, graph: Graph, device: Device, budget_bytes: int) -> Plan:
    """The plan of `graph` whose live bytes, or those where it is placed, are within a budget. Raises InfeasibleBudget."""
    if options.placer is None or is_of_card(options, device):
        return make_plan(graph, device, options.policy, budget_bytes, options.times)
    if has_arena(options, device):
        return _in_arena(options, graph, device, budget_bytes)
    return plan_within(graph, device, options.policy, budget_bytes, options.placer, options.times).plan


def _in_arena(options: Options, graph: Graph, device: Device, budget_bytes: int) -> Plan:
    """The plan whose arena, with what is live beside it, lies within a budget. Raises InfeasibleBudget."""

    def make(nbytes: int, effort: float) -> tuple[None, Plan]:
        with at_effort(effort):
            return None, make_plan(graph, device, options.policy, nbytes, options.times)

    _, plan = plan_in_arena(make, budget_bytes, lambda plan: in_arena(plan, solver_named(), SEARCH))
    if plan.peak_bytes <= budget_bytes:
        return replace(plan, budget_bytes=budget_bytes)
    budget, taken = format_apart(budget_bytes, plan.peak_bytes)
    raise InfeasibleBudget(
        f"infeasible: with planned addresses no plan lies within {budget}; the least that one took is {taken}",
        budget_bytes=budget_bytes,
        floor_bytes=plan.peak_bytes,
        cause="an arena that stays until the end of the step",
    )


def split_update(error: InfeasibleBudget) -> str:
    """What would help a step by calls, if it is its update that takes the memory."""
    if f"at {UPDATE} of" not in error.cause:
        return ""
    return "; the optimizer's update takes it, which overspill.train_step (--whole-step) would split"


@contextmanager
def infeasible_for(what: str, inputs: Iterable[Any], *, whole_step: bool = False) -> Iterator[None]:
    """An InfeasibleBudget that is raised inside says which graph it is of and on which inputs, and what else would do.

    Of a `whole_step` nothing else would.
    """
    try:
        yield
    except InfeasibleBudget as error:
        shapes = ", ".join(str(tuple(i.shape)) for i in inputs if isinstance(i, Tensor)) or "no tensors"
        instead = "" if whole_step else split_update(error)
        if f"at {REST} of" in error.cause:
            instead = "; it is set aside for the loss outside of the model: compute that inside, or say what it takes with reserve="
        would_do = f"budget={error.floor_bytes} would do"
        if whole_step:
            would_do += " for steps on such inputs"
        elif what == "training":
            would_do += (
                ', if no other calls or graphs need room beside it: budget="smallest" finds what is enough for all'
            )
        raise error.told(f"{instead} (the {what} graph, on inputs of {shapes}); {would_do}") from None


def store_bytes(plan: Plan) -> int:
    """Store bytes that one step of `plan` needs, each tensor rounded up to pages."""
    moved = plan.schedule.targets(Verb.OFFLOAD) + plan.schedule.targets(Verb.PREFETCH)
    stored = dict.fromkeys((*plan.schedule.stored, *moved))
    return sum(whole_pages(plan.graph.tensors[t].nbytes) for t in stored)
