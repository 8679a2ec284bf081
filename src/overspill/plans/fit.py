"""Find the plan within a budget: plan for live bytes, place the plan, and plan again for fewer until it fits.

The bytes that an allocator takes do not grow steadily with live bytes: of two plans the one with more live bytes may
take less. So several are made, for live bytes on a grid, which budgets of nearly one size share. The fastest that fits
counts. Little effort finds where plans begin to fit. Those near there are then made with all of it, on as many threads
as the machine has cores. Their number does not change the answer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice
from operator import itemgetter
from typing import TypeVar

from overspill.core import Graph, Tensor, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.progress import progress
from overspill.core.units import format_bytes
from overspill.costs import MeasuredTimes
from overspill.planning.effort import EFFORT, at_effort
from overspill.policies import Policy

from .account import Account
from .plan import NOTHING_BYTES, Plan, make_plan

R = TypeVar("R")
GRID = 24
"""Grid sizes between a number and its double."""
TRIES = 8
"""Plans made to find where they begin to fit."""
UPWARDS = 6
"""Further plans made for more live bytes than the largest plan found to fit."""
FROM_FLOOR = 16
"""Plans made from the fewest live bytes upwards, to find the smallest budget."""
MOST_FLOORS = 8
"""Floors that are followed to the smallest plan."""
HOPE = 1.1
"""If the plan of fewest live bytes takes more than so many times the budget, none of more is searched for.

Nor is one that is fast enough, if all such plans that were tried take more than that.
"""
CLOSE, FURTHER = 0.96, 1
"""At planned addresses, if the first plan that fits takes less than this share of the budget, so many follow."""
FIRST_EFFORT = 0.2
"""Share of the effort with which plans are made to find where they begin to fit."""
NEAR = 1.02
"""The slowdown up to which little can be gained."""
MANY_OPS = 1000
"""Of a step with more ops, whose plans take seconds each, fewer are made where these gain little."""
LOOSE = 1.05
"""Share of its live bytes that a placed plan may take before another way to place is tried too, if it is not NEAR."""
BUSY = 0.8
"""The share of a step for which a disk works that leaves little to gain."""
EFFORT_GAIN = 1.03
"""The most by which all of the effort is expected to speed a plan up, where only one that is fast enough counts."""
GAIN = 1.01
"""Nor if the step takes at most so many times as long as with all of the budget for live bytes."""


def search(
    graph: Graph, account: Account, policy: str | Policy, budget_bytes: int, times: MeasuredTimes | None = None
) -> Fit:
    """Return the search for a plan of `policy` for `graph` within `budget_bytes` of `account`."""
    return Fit(lambda live: make_plan(graph, account.device, policy, live, times), account, budget_bytes)


def fit(make: Callable[[int], Plan], account: Account, budget_bytes: int) -> Plan:
    """Return the fastest plan found that takes no more than `budget_bytes` of `account`.

    `make` plans for live bytes. Raises InfeasibleBudgetError with the smallest budget that works.
    """
    return Fit(make, account, budget_bytes).plan()


class Fit:
    """A search for the plan within a budget; a single quick plan already shows how fast that can be at best.

    The arguments are those of `fit`. Nothing is planned before it is needed, and nothing twice.
    """

    def __init__(self, make: Callable[[int], Plan], account: Account, budget_bytes: int) -> None:
        self._begun = time.perf_counter()
        self._account = account
        self._budget_bytes = budget_bytes
        self._tensor_bytes = budget_bytes - account.context_bytes
        self._effort = EFFORT.get()

        @cache  # all searches share its plans
        def made(live_bytes: int, effort: float) -> Plan:
            progress(f"a plan of {format_bytes(live_bytes)} of live bytes")
            with at_effort(effort):
                return make(live_bytes)

        def searches(*, on_host: bool) -> list[_Search]:
            ways = account.alternatives
            return [_Search(made, way, self._tensor_bytes, self._effort, on_host=on_host) for way in ways]

        self._searches = {on_host: searches(on_host=on_host) for on_host in account.beginnings}

    @cached_property
    def _hoped(self) -> Plan | InfeasibleBudgetError:
        try:
            return self._at_first()
        except InfeasibleBudgetError as error:
            return error.with_traceback(None)

    @property
    def hoped(self) -> Plan | None:
        """The plan if live bytes may have all of the budget, which no placed plan beats by much; None without any."""
        return None if isinstance(self._hoped, InfeasibleBudgetError) else self._hoped

    @property
    def refused_below(self) -> int | None:
        """If the budget is below the fewest live bytes of any plan: these, with the context; None otherwise."""
        if not isinstance(self._hoped, InfeasibleBudgetError) or self._hoped.floor_bytes <= self._tensor_bytes:
            return None
        return self._hoped.floor_bytes + self._account.context_bytes

    def plan(self) -> Plan:
        """Return the plan. Raises InfeasibleBudgetError."""
        if self._account.placed_by is None:
            return self._at_first()
        tried = (self._fastest(on_host=on_host) for on_host in self._beginnings if self.refused_below is None)
        found = next(filter(None, tried), None)
        if found is None:
            *_, fewest_there = self._beginnings
            least = self._account.least
            ways = [one for one in self._searches[fewest_there] if least in (one.account, self._account)]
            floors = [self._floor(search, on_host=fewest_there) for search in ways]
            found, fewest, cause = min(floors, key=lambda floor: floor[0].taken_bytes)
            if found.taken_bytes > self._tensor_bytes:
                raise least.refusal(self._budget_bytes, found, fewest, cause)
        charged = self._account.charged(found, self._budget_bytes)
        return replace(charged, plan_seconds=time.perf_counter() - self._begun)

    def _at_first(self) -> Plan:
        first, *_ = next(iter(self._searches.values()))
        if self._account.placed_by is None:
            return first.made(self._tensor_bytes, self._effort)
        return first.made(first.first_bytes, FIRST_EFFORT * self._effort)

    @cached_property
    def _beginnings(self) -> tuple[bool, ...]:
        """Whether the model begins in host memory: the answers to search for, in order."""
        if self.hoped is None:  # no plan is expected to fit, and the search finds out why
            return self._account.beginnings[-1:]
        return self._account.beginnings if may_leave(self.hoped.graph) else self._account.beginnings[:1]

    def _may_fit(self, *, on_host: bool) -> bool:
        """Return whether what is on the device before the first step leaves anything to search for."""
        if self.hoped is None:
            return True
        return sum(t.nbytes for t in there_before(self.hoped.graph, model_on_host=on_host)) <= self._tensor_bytes

    def _floor(self, search: _Search, *, on_host: bool) -> tuple[Plan, Plan, str]:
        """Return the plan that takes the least, that with the fewest live bytes, and the cause of these.

        If even the fewest live bytes exceed the budget, a plan of these is named, found at once.
        """
        if self.refused_below is not None and self._budget_bytes > NOTHING_BYTES:
            _, fewest, cause = search.at_floor(thorough=False)
            return fewest, fewest, cause
        _, fewest, cause = search.at_floor()
        far = self._budget_bytes > NOTHING_BYTES and fewest.peak_bytes > self._tensor_bytes
        return (fewest if far or not self._may_fit(on_host=on_host) else search.from_floor()), fewest, cause

    def _may_hold(self, search: _Search) -> bool:
        return self.hoped is None or search.may_hold(self.hoped)

    def _fastest(self, *, on_host: bool) -> Plan | None:
        """Return the fastest plan found that fits; the next placement is tried only if this one costs much.

        Where the last takes the least in any case, the others are tried only for plans as fast as there, but for GAIN.
        """
        found: list[Plan] = []
        searches = self._searches[on_host] if self._may_fit(on_host=on_host) else []
        if self._account.least is not self._account:
            most_seconds = 0.0 if self.hoped is None else GAIN * self.hoped.step_seconds
            for search in filter(self._may_hold, searches[:-1]):
                if (plan := search.fastest(most_seconds)) is not None:
                    if plan.step_seconds <= most_seconds:
                        return plan
                    found.append(plan)
            searches = searches[-1:]
        for number, search in enumerate(searches, 1):
            if (plan := search.fastest()) is not None:
                plan = search.or_faster(plan, self._searches[on_host])
                found.append(plan)
                if plan.taken_bytes <= LOOSE * plan.peak_bytes or plan.slowdown <= NEAR:
                    break
                if self.hoped is not None and plan.step_seconds <= GAIN * self.hoped.step_seconds:
                    break
                # If the same plan does not fit in the other way, only slower ones of fewer live bytes may.
                others = self._account.alternatives[number:]
                if all(other.placed(replace(plan, places=None)).taken_bytes > self._tensor_bytes for other in others):
                    break
        return min(found, key=lambda plan: plan.step_seconds, default=None)


class _Search:
    """Plans for `tensor_bytes`, each placed as `account` does; `made` makes them, with an effort."""

    def __init__(
        self, made: Callable[[int, float], Plan], account: Account, tensor_bytes: int, effort: float, *, on_host: bool
    ) -> None:
        self.made = made
        self._on_host = on_host
        self.account = account
        self._bytes = tensor_bytes
        self._full, self._little = effort, FIRST_EFFORT * effort
        self._tried: dict[tuple[int, float], Plan] = {}

    @property
    def first_bytes(self) -> int:
        """The live bytes that are tried first: all of the budget."""
        return self._near(self._bytes)

    def fastest(self, most_seconds: float = math.inf) -> Plan | None:
        """Return the fastest plan tried that fits, or None; more are tried only for one that takes at most these."""
        try:
            low = self._largest_that_fits(most_seconds)
        except InfeasibleBudgetError:
            low = 0
        if not low and most_seconds < math.inf:
            return None
        if not low:
            self.at_floor(thorough=False)  # a budget may have been named by this plan
            _, least, _ = self.at_floor()
            if not self.account.is_steady and least.taken_bytes <= HOPE * self._bytes:
                self.from_floor()
        elif self._may_gain(found := self._at(low, self._little)):
            more = 0 if self.account.is_steady or not self._may_gain_by_bytes(found) else UPWARDS
            near = [low, *(live for live in islice(upwards_from(low), more) if live <= self._bytes)]
            made = self._at_all(near if self.account.is_steady else self._fast_enough(near, most_seconds))
            if self.account.is_steady and (excess := made[0].taken_bytes - self._bytes) > 0 and low > excess:
                with suppress(InfeasibleBudgetError):  # the plan of little effort fits
                    self._at(low - excess, self._full)
        # In the order of live bytes, because threads add them in any.
        fitting = [
            plan for _, plan in sorted(self._tried.items(), key=itemgetter(0)) if plan.taken_bytes <= self._bytes
        ]
        return min(fitting, key=lambda plan: plan.step_seconds, default=None)

    def may_hold(self, hoped: Plan) -> bool:
        """Return whether a plan of about as many live bytes as `hoped`, which is made already, may fit."""
        if self.account.is_steady or len(hoped.graph.ops) <= MANY_OPS:
            return True
        return not self._is_hopeless(self.account.placed(self._begun(hoped)))

    def or_faster(self, plan: Plan, others: Iterable[_Search]) -> Plan:
        """Return `plan`, or the fastest that `others` made of no more live bytes, if that is faster and fits here."""
        made = ((p.step_seconds, *key) for other in others for key, p in other._tried.items() if key not in self._tried)
        seconds, live, effort = min((one for one in made if one[1] <= plan.peak_bytes), default=(math.inf, 0, 0.0))
        other = self._at(live, effort) if seconds < plan.step_seconds else plan
        return other if other.taken_bytes <= self._bytes else plan

    def _may_gain(self, plan: Plan) -> bool:
        """Return whether all of the effort may make a plan faster: not one that is NEAR, or whose disk is BUSY."""
        if len(plan.graph.ops) <= MANY_OPS:
            return plan.slowdown > 1
        is_busy = plan.timeline.disk_seconds > BUSY * plan.step_seconds
        return plan.slowdown > NEAR and not is_busy and plan.disk_slowdown <= EFFORT_GAIN

    def _may_gain_by_bytes(self, plan: Plan) -> bool:
        """Return whether more live bytes may make a plan faster, by that with all of the budget."""
        most = self._at(self.first_bytes, self._little)
        return len(plan.graph.ops) <= MANY_OPS or plan.step_seconds > GAIN * most.step_seconds

    def _fast_enough(self, asked: Iterable[int], most_seconds: float) -> list[int]:
        """Return those of the live bytes `asked` with which a plan may fit and take at most `most_seconds`."""
        tried = self._tried.items()
        if min((p.taken_bytes for _, p in tried if p.step_seconds <= most_seconds), default=0) > HOPE * self._bytes:
            return []
        # With no more bytes than a plan that is far too slow, none is fast enough.
        fewest = max((live for (live, _), p in tried if p.step_seconds > EFFORT_GAIN * most_seconds), default=0)
        return [live for live in asked if live > fewest]

    def from_floor(self) -> Plan:
        """Return the plan that takes the least.

        The plans tried do not depend on the budget, so the one that an error names will work.
        """
        floor, fewest, _ = self.at_floor()
        # Beyond what the first takes, nothing smaller can come.
        most = min(fewest.taken_bytes, fewest.unmanaged_peak_bytes)
        beyond = (live for live in islice(upwards_from(max(floor, fewest.peak_bytes)), FROM_FLOOR) if live < most)
        return min([fewest, *self._at_all(beyond)], key=lambda plan: plan.taken_bytes)

    def at_floor(self, *, thorough: bool = True) -> tuple[int, Plan, str]:
        """Return the fewest live bytes, their plan and cause; unless `thorough`, it is made with little effort."""
        return least_of(lambda live: self._at(live, self._full if thorough else self._little))

    def _largest_that_fits(self, most_seconds: float) -> int:
        """Return the most live bytes found with which a plan fits, or 0.

        Raises InfeasibleBudgetError below the fewest.
        """
        asked, low, over = self.first_bytes, 0, self._bytes
        further = FURTHER
        for _ in range(TRIES):
            plan = self._at(asked, self._little)
            excess = plan.taken_bytes - self._bytes
            if excess <= 0:
                low = max(low, asked)
            else:
                over = asked
                if plan.step_seconds > most_seconds or (self._is_hopeless(plan) and most_seconds < math.inf):
                    break  # with fewer bytes it takes longer still
            if low and self.account.is_steady and (not further or low >= over or self._is_close(low)):
                break
            # Bisect, at planned addresses by the bytes taken; before anything fits, go down by the excess.
            between = 0.5
            if low and self.account.is_steady:
                further -= 1
                least, most = (self._at(live, self._little).taken_bytes for live in (low, over))
                between = min((self._bytes - least) / (most - least), 1.0) if most > least else 0.5
            asked = self._near(low + int(between * (over - low)) if low else min(asked, plan.peak_bytes) - excess)
            if asked <= low:
                break
        return low

    def _is_hopeless(self, plan: Plan) -> bool:
        """Return whether a placed plan, which takes seconds to make, takes far too much."""
        return len(plan.graph.ops) > MANY_OPS and plan.taken_bytes > HOPE * self._bytes

    def _is_close(self, live_bytes: int) -> bool:
        """Return whether a plan of some more live bytes than this one, which fits, gains little."""
        plan = self._at(live_bytes, self._little)
        return plan.taken_bytes >= CLOSE * self._bytes or plan.slowdown <= NEAR

    def _near(self, nbytes: int) -> int:
        return max(1, nbytes) if self.account.is_steady else on_grid(nbytes)

    def _at_all(self, asked: Iterable[int]) -> list[Plan]:
        """Return the plans for these live bytes, made at once; the search frees Python's lock."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [pool.submit(copy_context().run, self._at, live, self._full) for live in asked]
            try:
                return [one.result() for one in made]
            finally:  # after an error, or Ctrl-C, none begins
                pool.shutdown(wait=False, cancel_futures=True)

    def _begun(self, plan: Plan) -> Plan:
        return replace(plan, model_on_host=True) if self._on_host and may_leave(plan.graph) else plan

    def _at(self, live_bytes: int, effort: float) -> Plan:
        if (live_bytes, effort) not in self._tried:
            plan = self._begun(self.made(live_bytes, effort))
            # By the first, which no thread makes while others do: so the answer does not depend on their order.
            first = next(iter(self._tried.values()), None)
            account = self.account if first is None else self.account.with_likely(first)
            self._tried[live_bytes, effort] = account.placed(plan)
        return self._tried[live_bytes, effort]


def there_before(graph: Graph, *, model_on_host: bool = False) -> list[Tensor]:
    """Return the tensors on the device before the first step: the model and its batch.

    With the `model_on_host`, these are the batch and what no schedule takes off the device.
    """
    present = (t for t in graph.tensors if t.persistent and t.kind is not TensorKind.OPTIMIZER_STATE)
    return [t for t in present if not (model_on_host and t.movable and t.kind is not TensorKind.INPUT)]


def may_leave(graph: Graph) -> bool:
    """Return whether a schedule of `graph` may have parts of the model off the device between steps."""
    return any(t.persistent and t.movable and t.kind is TensorKind.PARAMETER for t in graph.tensors)


def least_of(make: Callable[[int], R], asked: int = 1) -> tuple[int, R, str]:
    """Return the fewest live bytes from `asked` on that `make` accepts, its result, and why no fewer work.

    A graph whose surroundings depend on its plan may refuse a floor that it named, and name another. Raises the last of
    MOST_FLOORS refusals.
    """
    cause = "the policy has no smaller plan"
    for _ in range(MOST_FLOORS):
        try:
            return asked, make(asked), cause
        except InfeasibleBudgetError as error:
            asked, cause = error.floor_bytes, error.cause
    return asked, make(asked), cause


def on_grid(nbytes: int) -> int:
    """Return the largest grid size up to `nbytes`; at least 1."""
    return _size(math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9))


def upwards_from(nbytes: int) -> Iterator[int]:
    """Yield the grid sizes above `nbytes`, ascending."""
    number = math.floor(GRID * math.log2(max(1, nbytes)) + 1e-9)
    while True:
        number += 1
        yield _size(number)


def _size(number: int) -> int:
    return math.ceil(2 ** (number / GRID))
