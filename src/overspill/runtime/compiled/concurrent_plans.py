"""Plan concurrent calls: each leaves memory for the tensors that the others keep.

The bytes that a call keeps for backward depend on its plan. The memory for its plan depends on the bytes that the
others keep. So the bytes that each may keep are settled for all calls at once, before any of them is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from overspill.capture.compiled.graph import InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph, storage_bytes
from overspill.core import Graph, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes, size_enough
from overspill.planning.floor import retained_bytes
from overspill.planning.gaps import may_move, swappable_gaps
from overspill.planning.step_program import StepProgram
from overspill.plans.account import Account
from overspill.plans.fit import Fit, search
from overspill.plans.plan import Plan, smallest_budget, unmanaged_peak
from overspill.policies.in_core import Liveness
from overspill.runtime.infeasible import AT_ONCE
from overspill.runtime.options import Options

from .pending_calls import GraphFrame, GraphKey

SHARES = (1.0, 0.9, 0.8, 0.65, 0.5, 0.25, 0.0)
"""Shares of the most that calls could keep, tried in this order until all have a plan."""


class HasGraph(Protocol):
    """A captured step, of any kind of capture."""

    @property
    def graph(self) -> Graph:
        """The step's Graph."""


C = TypeVar("C", bound=HasGraph)


@dataclass(frozen=True)
class Room:
    """Bytes that the plan of a call reserves for concurrent calls."""

    pending_bytes: int = 0
    """Bytes that the others keep for backward."""
    loss_bytes: int = 0
    """Bytes for the losses of the others."""
    keep_bytes: int | None = None
    """Bytes that the call itself may keep; None: as many as fit."""
    sums: bool = False
    """Whether others have gradients of the same parameters, which are on the device during its backward."""
    is_settled: bool = False
    """Whether the others are known, also those behind a graph break."""


ALONE = Room()
KNOWN_ALONE = Room(is_settled=True)


@dataclass(frozen=True)
class GraphProblem(Generic[C]):
    """One graph of a model, and how to capture and plan it."""

    kind: GraphKey
    frame: GraphFrame
    joint: JointGraph
    inputs: list[InputInfo]
    surroundings: Surroundings
    options: Options
    account: Account
    capture: Callable[[JointGraph, list[InputInfo], Surroundings], C]
    """Makes a captured step of the joint graph."""
    plan: Callable[[GraphProblem[C], C, int], Plan]
    """Makes a Plan of the captured step within a budget in bytes."""
    late: bool = False
    """Whether its inputs arrive while other calls are pending; otherwise the plans of these count them."""
    aside_bytes: int = 0
    """Bytes in its surroundings that ops outside of planned graphs keep for backward."""

    def with_aside(self, kept_bytes: int, taken_bytes: int) -> GraphProblem[C]:
        """Return the problem beside ops outside of planned graphs that keep so much for backward and take so much."""
        here, more = self.surroundings, kept_bytes - self.aside_bytes
        around = replace(
            here, reserved_bytes=max(here.reserved_bytes, taken_bytes),
            outside_graph=tuple((k, n + more * (k is TensorKind.ACTIVATION)) for k, n in here.outside_graph),
        )  # fmt: skip
        return replace(self, surroundings=around, aside_bytes=kept_bytes)

    @property
    def trains(self) -> bool:
        """Whether the graph has a backward."""
        return bool(self.joint.tangents)

    def captured(self, room: Room, budget: int) -> C:
        """Capture with bytes reserved for concurrent calls.

        Before a graph break, all bytes that can be freed are reserved for the later graphs, until these are known.
        """
        here = self.surroundings
        around = replace(
            here, pending_bytes=room.pending_bytes, sums=room.sums, reserved_bytes=here.reserved_bytes + room.loss_bytes
        )
        found = self.capture(self.joint, self.inputs, around)
        # Reserve what the call must not keep between forward and backward.
        keep = self.least_bytes if self.frame.broken and not room.is_settled else room.keep_bytes
        if keep is None or self.account.has_arena:
            return found
        stays = sum(t.nbytes for t in found.graph.tensors if t.persistent and not may_move(t))
        rest = budget - room.pending_bytes - keep - stays
        return self.capture(self.joint, self.inputs, replace(around, reserved_bytes=max(around.reserved_bytes, rest)))

    def planned(self, room: Room, budget: int) -> tuple[C, Plan]:
        """Return the captured graph and its plan. Raises InfeasibleBudgetError."""
        captured = self.captured(room, budget)
        plan, within = self.plan(self, captured, budget), budget
        if room.keep_bytes is not None and self.account.has_arena:
            # It keeps all of its arena: that is to be as much smaller as it keeps too much.
            while (over := plan.retained_bytes - room.pending_bytes - room.keep_bytes) > 0:
                within = min(within, plan.peak_bytes) - over
                plan = replace(self.plan(self, captured, max(1, within)), budget_bytes=budget)
        return captured, plan

    def search(self, graph: Graph, budget: int) -> Fit:
        """Return the search for a plan of one capture; its budget counts the bytes that a GPU leaves for tensors."""
        return search(graph, self.account.of_tensors, self.options.policy, budget, self.options.times)

    def as_one_of_several(self) -> GraphProblem[C]:
        """Return the problem of a call that is not alone.

        On a GPU it has no arena, because it would keep the whole arena.
        """
        return replace(self, account=self.account.alone) if self.account.is_card else self

    def floor_bytes(self, room: Room) -> int:
        """Return the smallest feasible budget in bytes."""
        captured = self.captured(room, 0)
        return smallest_budget(lambda nbytes: self.plan(self, captured, nbytes))

    @cached_property
    def alone(self) -> Graph:
        """The graph with no concurrent calls."""
        return self.capture(self.joint, self.inputs, self.surroundings).graph

    @cached_property
    def least_bytes(self) -> int:
        """The fewest bytes that the call can keep between forward and backward."""
        program = StepProgram(self.alone)
        boundary = program.end_of_forward
        absent = {g.tensor for g in swappable_gaps(program) if g.start < boundary <= g.end}
        return sum(
            t.nbytes for t in self.alone.tensors
            if not t.persistent and t.id not in absent and (u := program.touches[t.id]) and u[0] < boundary <= u[-1]
        )  # fmt: skip

    @cached_property
    def around_bytes(self) -> int:
        """Bytes of the inputs of a pending call, and of the gradients of its outputs."""
        names = {info.name for info in self.inputs}
        gradients: dict[int, int] = {}
        for node in self.joint.given_tangents:
            gradients.update(storage_bytes(node))
        inputs = (t.nbytes for t in self.alone.tensors if t.kind is TensorKind.INPUT and t.name in names)
        return sum(inputs) * self.late + sum(gradients.values())

    @property
    def loss_bytes(self) -> int:
        """Bytes reserved for the loss of each call.

        The user's own `reserve` is for all calls together.
        """
        return self.surroundings.reserved_bytes if self.options.reserve is None else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that its backward makes, unless they exist already."""
        if self.surroundings.accumulates:
            return 0
        return sum(t.nbytes for t in self.alone.tensors if t.kind is TensorKind.GRADIENT and not t.persistent)


def free_memory_for(
    kind: GraphKey,
    others: Counter[GraphKey],
    problems: Mapping[GraphKey, GraphProblem[Any]],
    keeps: Mapping[GraphKey, int],
    keep: int | None = None,
    *,
    sums: bool,
) -> Room:
    """Return the Room that a call of `kind` leaves to concurrent `others`.

    `keeps` has the bytes that each of these keeps for backward. Calls of one part have their own inputs and losses;
    different parts pass tensors on.
    """
    alike = {other: count for other, count in others.items() if other.part == kind.part}
    return Room(
        sum(count * keeps[other] for other, count in others.items())
        + sum(count * problems[other].around_bytes for other, count in alike.items()),
        sum(count * problems[other].loss_bytes for other, count in alike.items()),
        keep,
        sums,
        is_settled=True,
    )


def is_summed(kind: GraphKey, beside: Mapping[GraphKey, Counter[GraphKey]]) -> bool:
    """Return whether backward of `kind` may find gradients of a concurrent call.

    That is so for calls of the same part. Autograd decides which backward comes first; if both begin at once, it is the
    call that ran last.
    """
    return any(kind in (one, other) and one.part == other.part for one, others in beside.items() for other in others)


class Settlement:
    """Decides how many bytes concurrent calls may keep within one budget."""

    def __init__(
        self, problems: Mapping[GraphKey, GraphProblem[Any]], beside: Mapping[GraphKey, Counter[GraphKey]]
    ) -> None:
        self.problems = problems
        self.beside = {
            k: others for k, others in beside.items() if others and k in problems and others.keys() <= problems.keys()
        }
        self.kinds = list(dict.fromkeys(k for kind, others in self.beside.items() for k in (kind, *others)))
        self.least = {k: problems[k].least_bytes for k in self.kinds}

    def rooms(self, budget: int) -> dict[GraphKey, Room]:
        """Return the Room of each kind of call. Raises InfeasibleBudgetError, with a budget that works."""
        try:
            alone = {k: self._keeps(k, KNOWN_ALONE, budget) for k in self.kinds}
        except InfeasibleBudgetError:
            raise self._too_small(budget, self.smallest()[0]) from None
        # First try: all keep what they would keep alone.
        if (found := self._tried(alone, {}, budget)) is not None:
            return found
        # Then smaller and smaller shares of what is fair.
        most = self._fair(alone, budget)
        for share in SHARES:
            keeps = self._shared(share, most)
            if (found := self._tried(keeps, keeps, budget)) is not None:
                return found
        # Last, what works in the smallest budget.
        least_budget, keeps = self.smallest()
        if least_budget <= budget and (found := self._tried(keeps, keeps, budget)) is not None:
            return found
        raise self._too_small(budget, least_budget)

    def _too_small(self, budget: int, least_budget: int) -> InfeasibleBudgetError:
        count = max(sum(others.values()) for others in self.beside.values()) + 1
        floor_bytes = max(least_budget, budget + 1)
        graphs = {(kind.part[0], self.problems[kind].frame.id) for kind in self.kinds}
        is_one_call = len(graphs) == count and len({model for model, _ in graphs}) == 1
        what = f"{count} graphs of the model" if is_one_call else f"{count} calls"
        stacked = "" if is_one_call else "one call with the inputs stacked, or "
        return InfeasibleBudgetError(
            f"infeasible: {what} wait for their backward at once, and what they keep does not fit beside one "
            f'another in {format_bytes(budget)}; budget="{size_enough(floor_bytes)}" would do, or {stacked}'
            "overspill.train_step",
            budget_bytes=budget,
            floor_bytes=floor_bytes,
            cause=f"what {what} keep {AT_ONCE}",
        )

    def smallest(self) -> tuple[int, dict[GraphKey, int]]:
        """Return the smallest budget found in which all fit, and the bytes that each keeps then."""
        most = {k: self._keeps(k, KNOWN_ALONE, self.problems[k].floor_bytes(KNOWN_ALONE)) for k in self.kinds}
        for share in reversed(SHARES):
            keeps = self._shared(share, most)
            budget = max(self.problems[k].floor_bytes(self._room(k, keeps, None)) for k in self.kinds)
            if self._tried(keeps, keeps, budget) is not None:
                return budget, keeps
        # No limits then: let each call keep what it does at its own floor, until that is stable.
        while True:
            floors = {k: self.problems[k].floor_bytes(self._room(k, keeps, None)) for k in self.kinds}
            more = {k: self._keeps(k, self._room(k, keeps, None), floors[k]) for k in self.kinds}
            if all(more[k] <= keeps[k] for k in self.kinds):
                return max(floors.values()), keeps
            keeps = {k: max(more[k], keeps[k]) for k in self.kinds}

    def _shared(self, share: float, most: Mapping[GraphKey, int]) -> dict[GraphKey, int]:
        """Return the least that each keeps, plus a share of the bytes that it could keep beyond."""
        return {k: self.least[k] + int(share * max(0, most[k] - self.least[k])) for k in self.kinds}

    def unmanaged(self) -> tuple[int, int]:
        """Return the peak bytes with nothing moved: live bytes, and bytes as budgets count."""
        keeps = {}
        for kind in self.kinds:
            problem = self.problems[kind]
            keeps[kind] = retained_bytes(problem.alone, Liveness().plan(problem.alone, problem.account.device))
        live = counted = 0
        for kind in self.kinds:
            problem = self.problems[kind]
            graph = problem.captured(self._room(kind, keeps, None), 0).graph
            live = max(live, unmanaged_peak(graph, problem.account.device))
            counted = max(counted, problem.account.unmanaged(graph))
        return live, counted

    def _room(self, kind: GraphKey, keeps: Mapping[GraphKey, int], keep: int | None) -> Room:
        others = self.beside.get(kind, Counter())
        return free_memory_for(kind, others, self.problems, keeps, keep, sums=is_summed(kind, self.beside))

    def _keeps(self, kind: GraphKey, room: Room, budget: int) -> int:
        _, plan = self.problems[kind].planned(room, budget)
        return plan.retained_bytes - room.pending_bytes

    def _tried(
        self, keeps: Mapping[GraphKey, int], caps: Mapping[GraphKey, int], budget: int
    ) -> dict[GraphKey, Room] | None:
        """Return Rooms with which each call has a plan that keeps at most `keeps`; None without such plans."""
        found = {}
        for kind in self.kinds:
            room = self._room(kind, keeps, caps.get(kind))
            try:
                if self._keeps(kind, room, budget) > keeps[kind]:
                    return None
            except InfeasibleBudgetError:
                return None
            found[kind] = room
        return found

    def _fair(self, alone: Mapping[GraphKey, int], budget: int) -> dict[GraphKey, int]:
        """Return the most that each may keep if all get equal shares of the budget."""
        fair = dict(alone)
        for kind, others in self.beside.items():
            there = others + Counter([kind])
            around = sum(count * self.problems[k].around_bytes for k, count in there.items())
            persistent = sum(t.nbytes for t in self.problems[kind].alone.tensors if t.persistent)
            share = max(0, budget - around - persistent) / max(1, sum(count * alone[k] for k, count in there.items()))
            for k in there:
                fair[k] = min(fair[k], int(share * alone[k]))
        return fair
