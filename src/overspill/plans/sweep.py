"""The budget sweep: what the step of one graph costs at every budget, from the unmanaged peak to the smallest that works."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.core.reportable import Reportable
from overspill.core.units import format_bytes
from overspill.costs import MeasuredTimes
from overspill.planning.floor import Floor, below, peak_of
from overspill.policies import policy_named

from .comparison import NO_LIMIT_BYTES, Counting
from .plan import Plan, make_plan, unmanaged_peak

POINTS = 12
"""How many budgets are planned for, unless the curve is known with fewer."""
LEAST_POINTS = 2
KNOWN_SHARE = 1e-4
"""Where the rest of a curve cannot lie further off than this share of memory times time, no more budgets are tried."""


@dataclass(frozen=True)
class SweepPoint:
    """One policy at one budget of live bytes: its plan, or why there is none. No plan within the budget beats the bound."""

    policy: str
    budget_bytes: int
    lower_bound_seconds: float
    plan: Plan | None
    error: str | None = None

    @property
    def gap(self) -> float | None:
        """How much longer the step takes than the bound, as a share of the bound."""
        if self.plan is None:
            return None
        return self.plan.step_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0


@dataclass(frozen=True)
class Sweep(Reportable):
    """The step of one graph at many budgets: for each policy its points, from the largest budget to the smallest.

    `floors`: by policy the smallest budget that works, and what holds it up. Budgets are live bytes; on a GPU each plan
    knows what card it needs (`device_bytes`).
    """

    points: tuple[SweepPoint, ...]
    floors: dict[str, Floor]
    unmanaged_peak_bytes: int
    device: Device

    @property
    def frontier(self) -> tuple[SweepPoint, ...]:
        """The points that no other is as fast as with as little memory, from the largest budget to the smallest."""
        found: list[SweepPoint] = []
        fastest = float("inf")
        planned = [(p.budget_bytes, p.plan.step_seconds, p) for p in self.points if p.plan is not None]
        for budget, seconds, point in sorted(planned, key=lambda entry: entry[:2]):
            if seconds < fastest and (not found or found[-1].budget_bytes < budget):
                fastest = seconds
                found.append(point)
        return tuple(reversed(found))

    def fits(self, point: SweepPoint) -> bool:
        """Whether the device has room for the plan of `point`."""
        return point.plan is not None and point.plan.fits_device


def sweep(
    graph: Graph,
    device: Device,
    policies: Iterable[str] = ("auto",),
    points: int = POINTS,
    times: MeasuredTimes | None = None,
    progress: Callable[[str], None] | None = None,
    card: Counting | None = None,
) -> Sweep:
    """Each of `policies` at up to `points` budgets, from what the step takes unmanaged down to the smallest that works.

    Budgets lie where the curves bend; a policy's own smallest comes on top of them. A policy that makes one schedule has
    one point. `progress` is told what is being done; with a `card` plans say what it must have.
    Raises RequestError for an unknown name, and for fewer points than the two ends.
    """
    check_points(points)
    names = tuple(dict.fromkeys(policies))
    adapting = [name for name in names if policy_named(name).plans_for_budget]
    curves = [_Curve(name, partial(make_plan, graph, device, name, times=times), progress or _nobody) for name in names]
    for curve in curves:
        curve.begin(1 if curve.policy in adapting else NO_LIMIT_BYTES)
    top = unmanaged_peak(graph, device)
    adaptable = [curve for curve in curves if curve.policy in adapting]
    budgets = _refined(adaptable, top, points) if adaptable else []
    for curve in curves:
        curve.budgets = sorted({curve.floor.nbytes, *(budgets if curve in adaptable else ())}, reverse=True)
    points_of_all = _points(curves, card, progress or _nobody)
    return Sweep(tuple(points_of_all), {curve.policy: curve.floor for curve in curves}, top, device)


def check_points(points: int) -> None:
    """Raise RequestError for fewer budgets than a curve has ends."""
    if points < LEAST_POINTS:
        raise RequestError(
            f"{points} is too few for a sweep, which has its two ends at least; ask for {LEAST_POINTS} or more"
        )


def _nobody(what: str) -> None:
    """Nobody is told."""


@dataclass(eq=False)
class _Curve:
    """The plans of one policy so far; `floor` is the smallest budget that works, `budgets` those that it is asked for."""

    policy: str
    make: Callable[[int], Plan]
    progress: Callable[[str], None]
    floor: Floor = field(init=False)
    plans: list[Plan] = field(default_factory=list)
    errors: dict[int, InfeasibleBudget] = field(default_factory=dict)
    budgets: list[int] = field(default_factory=list)

    def begin(self, asked_bytes: int) -> None:
        """Plan for the smallest budget, which is what the plan for `asked_bytes` takes, or its error names."""
        self.progress(f"planning the smallest of {self.policy}")
        try:
            plan = self.make(asked_bytes)
        except InfeasibleBudget as error:
            self.floor = Floor(error.floor_bytes, error.cause)
            self.plan(error.floor_bytes)
        else:
            self.floor = peak_of(plan.graph, plan.schedule)
            self.plans.append(plan)

    def plan(self, budget: int) -> None:
        """Plan within `budget`, or note why that cannot be done."""
        if budget < self.floor.nbytes:
            self.errors[budget] = below(self.floor, budget, self.policy)
            return
        self.progress(f"planning {self.policy} within {format_bytes(budget)}")
        try:
            self.plans.append(self.make(budget))
        except InfeasibleBudget as error:
            self.errors[budget] = error

    def best(self, budget: int) -> Plan | None:
        """The fastest plan within `budget`: one that was made for another may be within it too, and counts."""
        within = [plan for plan in self.plans if plan.peak_bytes <= budget]
        best = min(within, key=lambda plan: plan.step_seconds, default=None)
        return best if best is None or best.budget_bytes == budget else replace(best, budget_bytes=budget)


def _refined(curves: Sequence[_Curve], top: int, points: int) -> list[int]:
    """Budgets from the smallest that any of `curves` has up to `top`, all planned, each where the curves were known least."""
    budgets: list[int] = []
    low = min(curve.floor.nbytes for curve in curves)
    wanted: int | None = max(low, top)
    while wanted is not None and wanted not in budgets and len(budgets) < points:
        for curve in curves:
            if wanted != curve.floor.nbytes:  # which is planned
                curve.plan(wanted)
        budgets = sorted([*budgets, wanted])
        wanted = low if len(budgets) == 1 else _least_known(curves, budgets)
    return budgets


def _least_known(curves: Sequence[_Curve], budgets: Sequence[int]) -> int | None:
    """The budget in the middle of what is known least; None where all is known well enough.

    More memory is never slower: between two budgets a curve lies in the rectangle that its points span, less what the
    plan for the larger leaves free.
    """
    areas: dict[int, float] = defaultdict(float)
    for less, more in pairwise(budgets):
        for curve in curves:
            slow, fast = curve.best(less), curve.best(more)
            if slow is not None and fast is not None and fast.peak_bytes > less:
                middle = (less + fast.peak_bytes) // 2
                areas[middle] += (fast.peak_bytes - less) * (slow.step_seconds / fast.step_seconds - 1)
    most = max(areas, key=lambda budget: areas[budget], default=None)
    return None if most is None or areas[most] < KNOWN_SHARE * (budgets[-1] - budgets[0]) else most


def _points(curves: Sequence[_Curve], card: Counting | None, progress: Callable[[str], None]) -> Iterator[SweepPoint]:
    """The points of all curves, each with its proven bound."""
    any_plan = next(plan for curve in curves for plan in curve.plans)
    bounds, bound = dict[int, float](), 0.0
    for budget in sorted({budget for curve in curves for budget in curve.budgets}, reverse=True):
        progress(f"proving the bound within {format_bytes(budget)}")
        # What no plan within a larger budget beats, none within a smaller one beats.
        bound = bounds[budget] = max(bound, replace(any_plan, budget_bytes=budget).lower_bound_seconds)
    for curve in curves:
        measured: dict[int, Plan] = {}
        for budget in curve.budgets:
            plan = curve.best(budget)
            if plan is None:
                yield SweepPoint(curve.policy, budget, bounds[budget], None, str(curve.errors[budget]))
                continue
            if card is not None:
                key = id(plan.schedule)
                measured[key] = known = measured.get(key) or card.measured(plan)
                plan = replace(known, budget_bytes=budget)
            yield SweepPoint(curve.policy, budget, bounds[budget], plan)
