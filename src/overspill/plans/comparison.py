"""Compare policies on one step: same graph, device and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import overload

from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudgetError, InvalidScheduleError, PolicyError
from overspill.core.reportable import Reportable
from overspill.costs import MeasuredTimes
from overspill.policies import POLICIES, Policy, policy_named

from .account import Account
from .fit import Fit
from .plan import NO_LIMIT_BYTES, Plan, make_plan, plans_once

BASELINE = "oracle"
"""The policy that slowdowns are relative to: it has unlimited memory and the fastest algorithms."""
BOUNDS = 7
"""Budgets at which the bound is proven for its curve, closer together where it bends: at little memory."""


Best = Callable[[Callable[[Graph], Fit]], Plan]
"""Returns the fastest plan of several graphs of one step, whole or in pieces of rows; a function searches in each."""


@dataclass(frozen=True)
class Row:
    """One policy's plan, or the reason and budget it would take."""

    policy: str
    plan: Plan | None
    """A policy that makes one schedule has a plan even if that is over the budget; it then does not fit."""
    fits: bool
    baseline_seconds: float
    error: str | None = None
    floor_bytes: int | None = None
    """The smallest budget that works, if there is no plan."""
    pool: str | None = None
    """The allocator or solver that places blocks; None if live bytes count."""
    crowded: bool = False
    """Whether live tensors would fit the budget, and do not as the pool places them."""
    note: str | None = None
    """A note on the policy that the reader must know for this step."""

    @property
    def slowdown(self) -> float | None:
        """Simulated step time over the baseline's."""
        if self.plan is None:
            return None
        return self.plan.step_seconds / self.baseline_seconds if self.baseline_seconds else 1.0

    @property
    def chosen(self) -> dict[str, str]:
        """The parameters that the policy found itself, and their values in words."""
        if self.plan is None:
            return {}
        return chosen_by(self.policy, self.plan)

    @property
    def least_bytes(self) -> int | None:
        """The least bytes that the policy needs, or None if unknown."""
        return self.floor_bytes if self.plan is None else self.plan.needed_bytes

    @cached_property
    def stall_seconds(self) -> dict[str, float]:
        """Seconds that compute waited for `offload` and for `prefetch`."""
        found = {"offload": 0.0, "prefetch": 0.0}
        for cause, seconds in self._stalls.items():
            kind = cause.split(" ", 1)[0]
            found[kind] = found.get(kind, 0.0) + seconds
        return found

    @property
    def stall_cause(self) -> str | None:
        """The transfer that compute waited for longest, or None, for example `prefetch of relu_3`."""
        return max(self._stalls, key=lambda cause: self._stalls[cause], default=None)

    @property
    def _stalls(self) -> dict[str, float]:
        return {} if self.plan is None else self.plan.timeline.wait_seconds


@dataclass(frozen=True, repr=False)
class Comparison(Sequence[Row], Reportable):
    """One row for each policy, within the same budget."""

    rows: tuple[Row, ...]
    device: Device
    budget_bytes: int
    """Live bytes, or those of a GPU's memory."""
    instead: Row | None = None
    """A row that was not asked for and fits, if none of `rows` does."""

    @property
    def unmanaged_bytes(self) -> int | None:
        """Bytes of the unmanaged step, as `overspill.estimate` counts them; None if no policy has a plan."""
        return next((row.plan.unmanaged_bytes for row in self.rows if row.plan is not None), None)

    @cached_property
    def lower_bound_seconds(self) -> float | None:
        """Seconds that no plan within the budget beats; None if no plan fits.

        They follow from the graph, the device and the budget.
        """
        if not any(row.fits for row in self.rows):
            return None
        return bound_of((row.plan for row in self.rows if row.plan is not None), self.budget_bytes)

    def bounds(self, points: int = BOUNDS) -> tuple[tuple[int, float], ...]:
        """Return budgets, and the seconds that no plan within each beats.

        They go from the least that any plan takes to what the step takes unmanaged.
        """
        plans = [row.plan for row in self.rows if row.plan is not None]
        if not plans:
            return ()
        low, high = min(plan.needed_bytes for plan in plans), plans[0].unmanaged_bytes
        shares = (at / (points - 1) for at in range(points))
        budgets = sorted(
            {self.budget_bytes, *(int(low + share**2 * max(0, high - low)) for share in shares)}, reverse=True
        )
        seconds = accumulate((bound_of(plans, budget) for budget in budgets), max)
        return tuple(sorted(zip(budgets, seconds, strict=True)))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]


def compare(
    graph: Graph,
    device: Device,
    policies: Iterable[str | Policy],
    budget_bytes: int | None = None,
    times: MeasuredTimes | None = None,
    progress: Callable[[str], None] | None = None,
    account_for: Callable[[Policy], Account] | None = None,
    best: Best | None = None,
) -> list[Row]:
    """Return a row for each of `policies`, the fastest that fits first, then those that do not fit, the least first.

    `account_for` returns the account of a policy: what of the device a budget counts (without it, live bytes). Without
    `budget_bytes` all of that is planned for. `progress` gets each policy's name before it plans. Policies that may run
    a step in pieces of rows have the `best` plan of its graphs. Raises RequestError for an unknown name.
    """
    # Check all names before any work.
    asked = {str(policy): policy for policy in map(policy_named, policies)}
    accounts = {name: account_for(policy) if account_for else Account(device) for name, policy in asked.items()}
    budget = min(a.whole_bytes for a in accounts.values()) if budget_bytes is None else budget_bytes
    # Slowdowns are relative to the baseline.
    baseline = make_plan(graph, device, BASELINE, NO_LIMIT_BYTES, times)
    rows = []
    for name, policy in asked.items():
        if progress is not None:
            progress(name)
        row = _row(graph, policy, accounts[name], budget, times, best)
        rows.append(replace(row, baseline_seconds=baseline.step_seconds, note=policy.note_on(graph)))
    return in_order(rows)


def chosen_by(policy: str, plan: Plan) -> dict[str, str]:
    """Return the parameters that `policy` found itself for `plan`, and their values in words."""
    name, same = policy.partition(":")[0], plan.schedule.policy == policy
    if same or name not in POLICIES or plan.schedule.policy.partition(":")[0] != name:
        return {}
    asked, found = policy_named(policy), policy_named(plan.schedule.policy)
    values = {p: getattr(found, p.field) for p in found.every_parameter()}
    return {p.name: p.shown(value) for p, value in values.items() if value != getattr(asked, p.field)}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows that fit by step time, then the others by needed bytes."""

    def key(row: Row) -> tuple[bool, float, int]:
        least = NO_LIMIT_BYTES if row.least_bytes is None else row.least_bytes
        return not row.fits, row.plan.step_seconds if row.fits and row.plan is not None else 0.0, least

    return sorted(rows, key=key)


def _row(
    graph: Graph, policy: Policy, account: Account, budget_bytes: int, times: MeasuredTimes | None, best: Best | None
) -> Row:
    """Return the row of one policy within a budget."""
    name, pool = str(policy), account.placed_by
    try:
        plan = planner(graph, policy, account, times, best)(budget_bytes)
    except InfeasibleBudgetError as error:
        # A policy without a plan still has a row, with its error.
        message = " ".join(str(error).split())
        return Row(name, None, False, 0.0, message, error.floor_bytes, pool, error.crowded)
    except (PolicyError, InvalidScheduleError) as error:  # the others have their rows all the same
        return Row(name, None, False, 0.0, " ".join(str(error).split()))
    fits = plan.needed_bytes <= budget_bytes and plan.fits_device
    crowded = not fits and pool is not None and plan.peak_bytes <= plan.most_live_bytes
    return Row(name, plan, fits, 0.0, pool=plan.pool, crowded=crowded)


def planner(
    graph: Graph, policy: Policy, account: Account, times: MeasuredTimes | None, best: Best | None
) -> Callable[[int], Plan]:
    """Return a function from a budget to the policy's plan, as by `overspill.plan`."""
    made = plans_once(account.device, policy, times)

    def within(budget_bytes: int) -> Plan:
        if not policy.plans_for_budget:
            return account.measured(made(graph, NO_LIMIT_BYTES)).for_budget(budget_bytes)

        def search(step: Graph) -> Fit:
            return Fit(partial(made, step), account, budget_bytes)

        return best(search) if best is not None and policy.in_pieces else search(graph).plan()

    return within


def bound_of(plans: Iterable[Plan], budget_bytes: int) -> float:
    """Return the seconds that no plan of any graph of `plans` beats within a budget."""
    one_each = {id(plan.graph): plan for plan in plans}
    return min(plan.for_budget(budget_bytes).lower_bound_seconds for plan in one_each.values())
