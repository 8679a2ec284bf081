"""The error for a card that is too small for every plan: what one must have, and what would do with less."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from overspill.core.errors import Amount, InfeasibleBudget
from overspill.core.units import format_apart, format_bytes
from overspill.plans.plan import Plan

from .allocators.caching_config import CachingConfig
from .card_search import Tried
from .packing import DEFAULT

if TYPE_CHECKING:
    from .card import Card

T = TypeVar("T")


def too_small(card: Card, budget_bytes: int, least: Tried[T], fewest: Tried[T], cause: str) -> InfeasibleBudget:
    """The error for a card of `budget_bytes`, which has no room for the plan that takes `least`."""
    floor_bytes, live_bytes = least.reserved_bytes + card.context_bytes, least.plan.peak_bytes
    needed, budget = format_apart(floor_bytes, budget_bytes)
    at_least = "" if least is fewest else f"at least {format_bytes(fewest.plan.peak_bytes)}"
    changes = _changes(card, fewest.plan, least.reserved_bytes)
    instead = ", ".join(f"with {change.what} {format_bytes(change.nbytes)} would do" for change in changes)
    return InfeasibleBudget(
        f"infeasible: a card of {budget} is too small; {needed} are needed: {format_bytes(card.context_bytes)} for the "
        f"context and {format_bytes(least.reserved_bytes)} in PyTorch's allocator, for "
        f"{format_bytes(live_bytes)} of live bytes ({at_least}{at_least and ': '}{cause}), library workspaces and fragmentation; "
        f"raise the budget or make the batch smaller{instead and '; '}{instead}",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        cause=f"{at_least} of live tensors: {cause}" if at_least else cause,
        parts=(
            Amount("context", card.context_bytes),
            Amount("reserved by PyTorch's allocator", least.reserved_bytes),
            Amount("of that live tensors", live_bytes),
        ),
        changes=changes,
    )


def _changes(card: Card, plan: Plan, reserved_bytes: int) -> tuple[Amount, ...]:
    """Settings with which `plan` would do with less than `reserved_bytes`, and the card that it would need, least first."""
    if card.solver is not None:
        return ()
    ways = [(replace(card, solver=DEFAULT, config=CachingConfig()), 'placement="planned"')]
    if not card.config.expandable_segments:
        expanding = replace(card.config, expandable_segments=True, max_split_bytes=None)
        ways.append((replace(card, config=expanding), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    found = sorted((other.reserved_bytes(plan), what) for other, what in ways)
    return tuple(Amount(what, nbytes + card.context_bytes) for nbytes, what in found if nbytes < reserved_bytes)
