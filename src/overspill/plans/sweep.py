"""The budget sweep: a step's cost at every budget.

Budgets go from the unmanaged step's down to the smallest that works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

from overspill.core import Device, Graph
from overspill.core.budget import Budget
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.reportable import Reportable
from overspill.core.units import format_bytes
from overspill.costs import MeasuredTimes
from overspill.planning.floor import Floor, below, peak_of
from overspill.policies import Policy, policy_named

from .account import Account
from .comparison import Best, bound_of, planner
from .plan import Plan, unmanaged_peak

POINTS = 12
"""How many budgets are planned for, unless the curve is known with fewer."""
LEAST_POINTS = 2
KNOWN_SHARE = 1e-4
"""No more budgets are tried once the rest of a curve is within this share of memory times time."""
THOUSANDTHS = 1000
"""Budgets are such shares of the unmanaged step, so that the printed share is the budget to the byte."""


@dataclass(frozen=True)
class SweepPoint:
    """One policy's plan at one budget, or why it has none."""

    policy: str
    budget_bytes: int
    lower_bound_seconds: float
    """No plan within the budget beats it."""
    plan: Plan | None
    error: str | None = None

    @property
    def gap(self) -> float | None:
        """How far the step is above the lower bound, as a share of it."""
        if self.plan is None:
            return None
        return self.plan.step_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


@dataclass(frozen=True, repr=False)
class Sweep(Reportable):
    """Each policy's plans at many budgets, the largest budget first. Budgets are live bytes, or sizes of a GPU's card.

    A budget for which a policy's plan is slower than for a smaller one is left out.
    """

    points: tuple[SweepPoint, ...]
    floors: dict[str, Floor]
    """By policy the smallest budget that works, and its cause."""
    unmanaged_peak_bytes: int
    device: Device
    unmanaged_device_bytes: int | None = None
    """Bytes that plain PyTorch takes of the card; None if budgets are live bytes."""
    whole_bytes: int | None = None
    """The budget of 100 %: what the unmanaged step takes in the worst case; None if that is `unmanaged_bytes`."""

    @property
    def unmanaged_bytes(self) -> int:
        """Bytes of the unmanaged step, counted as budgets are."""
        return self.unmanaged_peak_bytes if self.unmanaged_device_bytes is None else self.unmanaged_device_bytes

    def share_of(self, budget_bytes: int) -> float:
        """Return the share by which a budget of so many bytes is requested."""
        return 1.0 if budget_bytes == self.whole_bytes else budget_bytes / self.unmanaged_bytes

    @property
    def frontier(self) -> tuple[SweepPoint, ...]:
        """The points that no other beats in both memory and time, from the largest budget to the smallest."""
        found: list[SweepPoint] = []
        fastest = float("inf")
        planned = [(p.budget_bytes, p.plan.step_seconds, p) for p in self.points if p.plan is not None]
        for budget, seconds, point in sorted(planned, key=lambda entry: entry[:2]):
            if seconds < fastest and (not found or found[-1].budget_bytes < budget):
                fastest = seconds
                found.append(point)
        return tuple(reversed(found))

    def fits(self, point: SweepPoint) -> bool:
        """Return whether the device has enough memory for the plan of `point`."""
        return point.plan is not None and point.plan.fits_device


def sweep(
    graph: Graph,
    device: Device,
    policies: Iterable[str | Policy] = ("auto",),
    points: int = POINTS,
    times: MeasuredTimes | None = None,
    progress: Callable[[str], None] | None = None,
    account: Account | None = None,
    best: Best | None = None,
    account_for: Callable[[Policy], Account] | None = None,
) -> Sweep:
    """Plan each of `policies` at up to `points` budgets, from what the step takes unmanaged to the smallest that works.

    Budgets are chosen where the curves bend; a policy's own smallest is added to them. A policy that makes one schedule
    has one point. `progress` is called with each activity. `account` is what of the device budgets count (without it,
    live bytes), and `account_for` returns that of a policy (without it, the same). Policies that may run a step in
    pieces of rows have the `best` plan of its graphs. Raises RequestError for an unknown name, and for fewer points
    than the two ends.
    """
    check_points(points)
    asked = {str(policy): policy for policy in map(policy_named, policies)}
    # The largest budget is what the unmanaged step takes.
    account = account or Account(device)
    top, whole = account.unmanaged(graph), account.most_unmanaged(graph)
    curves = [
        _Curve(
            name,
            planner(graph, policy, account_for(policy) if account_for else account, times, best),
            top,
            policy.plans_for_budget,
            progress or _nobody,
        )
        for name, policy in asked.items()
    ]
    for curve in curves:
        curve.begin()
    adaptable = [curve for curve in curves if curve.adapts]
    # Refine where the curves bend.
    budgets = _refined(adaptable, top, whole, points) if adaptable else []
    for curve in curves:
        curve.budgets = sorted({curve.smallest_bytes, *(budgets if curve.adapts else ())}, reverse=True)
    found = _points(curves, progress or _nobody)
    floors = {curve.policy: curve.floor for curve in curves}
    return Sweep(tuple(found), floors, unmanaged_peak(graph, device), device, top if account.is_card else None, whole)


def check_points(points: int) -> None:
    """Raise RequestError for fewer budgets than a curve has ends."""
    if points < LEAST_POINTS:
        raise RequestError(
            f"{points} is too few for a sweep, which has its two ends at least; ask for {LEAST_POINTS} or more"
        )


def _nobody(what: str) -> None:
    """Ignore progress messages."""


@dataclass(eq=False)
class _Curve:
    """The plans of one policy so far, by budget."""

    policy: str
    make: Callable[[int], Plan]
    top_bytes: int
    """Bytes of the unmanaged step, of which budgets are shares."""
    adapts: bool
    progress: Callable[[str], None]
    floor: Floor = field(init=False)
    """The least budget that works."""
    plans: dict[int, Plan] = field(default_factory=dict)
    errors: dict[int, InfeasibleBudgetError] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=list)
    """The budgets that are shown."""

    def begin(self) -> None:
        """Plan for the smallest budget: the one that errors name, or all that the policy's one schedule takes."""
        self.progress(f"planning the smallest of {self.policy}")
        try:
            plan = self.make(1)
        except InfeasibleBudgetError as error:
            self.floor = Floor(error.floor_bytes, error.cause)
            self.plan(self.smallest_bytes)
        else:
            self.floor = replace(peak_of(plan.graph, plan.schedule), nbytes=plan.needed_bytes)
            self.plans[self.smallest_bytes] = plan.for_budget(self.smallest_bytes)

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget shown: the floor, as a share rounded up; for one schedule exactly that."""
        if not self.adapts or self.floor.nbytes >= self.top_bytes:
            return self.floor.nbytes
        budget = ceil(THOUSANDTHS * self.floor.nbytes / self.top_bytes)
        return budget_of_share(budget, self.top_bytes)

    def plan(self, budget: int) -> None:
        """Plan within `budget`, or record why that is infeasible."""
        if budget < self.floor.nbytes:
            self.errors[budget] = below(self.floor, budget, self.policy)
            return
        self.progress(f"planning {self.policy} within {format_bytes(budget)}")
        try:
            self.plans[budget] = self.make(budget)
        except InfeasibleBudgetError as error:
            self.errors[budget] = error

    def best(self, budget: int) -> Plan | None:
        """Return the fastest plan within `budget`."""
        within = [plan for plan in self.plans.values() if plan.needed_bytes <= budget]
        return min(within, key=lambda plan: plan.step_seconds, default=None)

    def is_beaten(self, budget: int) -> bool:
        """Return whether a smaller budget has a plan as fast or faster."""
        if (own := self.plans.get(budget)) is None:
            return False
        smaller = [plan for less, plan in self.plans.items() if less < budget]
        took = own.step_seconds, own.needed_bytes
        return any(p.step_seconds < took[0] or (p.step_seconds, p.needed_bytes) == took for p in smaller)


def budget_of_share(thousandths: int, unmanaged_bytes: int) -> int:
    """Return the budget in bytes, for thousandths of the unmanaged step's bytes, the same as for a percentage."""
    return Budget.parse(f"{thousandths / 10:.1f}%").bytes_of(lambda: unmanaged_bytes, 0, lambda: 0)


def _refined(curves: Sequence[_Curve], top: int, whole: int, points: int) -> list[int]:
    """Return budgets, all planned, each chosen where the curves are known least.

    They go from the smallest that any of `curves` has up to `whole`, and are shares of `top`.
    """
    budgets: list[int] = []
    low = min(curve.smallest_bytes for curve in curves)
    wanted: int | None = max(low, whole)
    while wanted is not None and len(budgets) < points:
        for curve in curves:
            if wanted not in curve.plans:
                curve.plan(wanted)
        budgets = sorted({*budgets, wanted})
        wanted = _least_known(curves, budgets, top) if low in budgets else low
    return budgets


def _least_known(curves: Sequence[_Curve], budgets: Sequence[int], top: int) -> int | None:
    """Return the budget in the middle of what is known least; None if all is known well enough.

    More memory is never slower. So between two budgets a curve is in the rectangle that its points span, less what the
    plan for the larger leaves free.
    """
    areas: dict[int, float] = defaultdict(float)
    for less, more in pairwise(budgets):
        for curve in curves:
            slow, fast = curve.best(less), curve.best(more)
            if slow is not None and fast is not None and fast.needed_bytes > less:
                thousandths = round(THOUSANDTHS * (less + fast.needed_bytes) / 2 / top)
                middle = budget_of_share(min(thousandths, THOUSANDTHS - 1), top)
                if less < middle < more:
                    areas[middle] += (fast.needed_bytes - less) * (slow.step_seconds / fast.step_seconds - 1)
    most = max(areas, key=lambda budget: areas[budget], default=None)
    return None if most is None or areas[most] < KNOWN_SHARE * (budgets[-1] - budgets[0]) else most


def _points(curves: Sequence[_Curve], progress: Callable[[str], None]) -> Iterator[SweepPoint]:
    """Yield the points of all curves, each with its proven bound."""
    plans = [plan for curve in curves for plan in curve.plans.values()]
    shown = {curve.policy: [b for b in curve.budgets if not curve.is_beaten(b)] for curve in curves}
    bounds, bound = dict[int, float](), 0.0
    for budget in sorted({budget for budgets in shown.values() for budget in budgets}, reverse=True):
        progress(f"proving the bound within {format_bytes(budget)}")
        # What no plan within a larger budget beats, none within a smaller one beats.
        bound = bounds[budget] = max(bound, bound_of(plans, budget))
    for curve in curves:
        for budget in shown[curve.policy]:
            error = None if budget in curve.plans else str(curve.errors[budget])
            yield SweepPoint(curve.policy, budget, bounds[budget], curve.plans.get(budget), error)
