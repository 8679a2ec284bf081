"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph, Schedule
from overspill.simulate import simulate

from .assemble import Transfer, assemble
from .base import Policy, earliest_return, latest_release, may_leave, saved_gaps
from .floor import infeasible
from .program import Gap, Positions, Program
from .select import Candidate, select

Seconds = NDArray[np.float64]
NEGLIGIBLE_STALLS = 0.002
"""A plan that waits for transfers for a smaller share of its ops' time is not worth another attempt."""
ROUNDS = 4
BUDGET_SHARES = (1.0, 0.95, 0.85)
ISSUE_MARGIN = 1.2
"""Prefetches are issued as if they took this much longer, for a transfer's real time varies."""


class Auto(Policy):
    """Take the cheapest tensors away from the peak until it fits, then move transfers to where they cost least.

    Tensors are chosen greedily by cost over benefit: exposed transfer or recompute seconds per byte-second relieved
    where the budget is exceeded. Offloads are awaited when they are done or when the memory is needed; prefetches
    start as late as they can without a stall, memory permitting (vDNN §III-B gives both rules their reason).

    What a transfer exposes shows only on the clock. So a plan that stalls is made again, with each tensor's stalls
    added to the cost of moving it, and under somewhat smaller budgets, whose plans fit as well; the fastest is taken.
    """

    name = "auto"
    summary = "the cheapest mix of offload and recomputation that fits the budget"
    source = "Overspill"
    offloads = True
    recomputes = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = Program(graph)
        live = program.live_bytes()
        if budget_bytes is None or live.max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        best: tuple[float, Schedule] | None = None
        for share in BUDGET_SHARES:
            planner = _Planner(graph, device, int(share * budget_bytes), seconds)
            for schedule, step_seconds in planner.attempts(program):
                if best is None or step_seconds < best[0]:
                    best = (step_seconds, replace(schedule, budget_bytes=budget_bytes))
            if best is None:  # smaller budgets would not fit either
                raise infeasible(program, budget_bytes, self.name)
            if planner.good_enough:
                break
        assert best is not None
        return best[1]


class _Planner:
    def __init__(self, graph: Graph, device: Device, budget_bytes: int, seconds: tuple[float, ...]) -> None:
        self.graph = graph
        self.device = device
        self.budget_bytes = budget_bytes
        self.seconds = seconds
        self.good_enough = False
        self.penalty: dict[int, float] = defaultdict(float)  # tensor -> seconds that its transfers have stalled compute

    def attempts(self, program: Program) -> Iterator[tuple[Schedule, float]]:
        """Schedules that fit, with their simulated seconds, until one hardly stalls or further rounds do not help."""
        for plan in (self.plan_with_recomputation, self.plan):
            self.penalty.clear()
            fastest = float("inf")
            for _ in range(ROUNDS):
                schedule = plan(program)
                if schedule is None:
                    break
                timeline = simulate(self.graph, schedule, self.device, self.seconds)
                yield schedule, timeline.step_seconds
                if timeline.exposed_transfer_seconds <= NEGLIGIBLE_STALLS * sum(self.seconds):
                    self.good_enough = True
                    return
                if timeline.step_seconds >= fastest:
                    break
                fastest = timeline.step_seconds
                for stall in timeline.stalls:
                    tensor = schedule.instructions[stall.instruction].target
                    self.penalty[tensor] += stall.end_seconds - stall.start_seconds

    def plan_with_recomputation(self, program: Program) -> Schedule | None:
        """The schedule of the joint choice; recomputations that would not fit where they run are given up one by one."""
        offloads = self._offload_candidates(program)
        recomputations = [c for c in map(self._recomputation, saved_gaps(program).values()) if c is not None]
        chosen, _ = select(
            program.live_bytes(),
            self._step_seconds(program),
            offloads + recomputations,
            self.budget_bytes,
            program.end_of_forward,
        )
        recompute = {c.gap.tensor for c in chosen if c.recompute}
        while recompute:
            attempt = Program(self.graph, recompute)
            schedule = self.plan(attempt)
            if schedule is not None:
                return schedule
            recompute -= self._too_large(attempt, recompute) or recompute
        return None

    def plan(self, program: Program) -> Schedule | None:
        """The schedule that fits `program` by offloading alone, or None."""
        offloads = self._offload_candidates(program)
        chosen, live = select(
            program.live_bytes(), self._step_seconds(program), offloads, self.budget_bytes, program.end_of_forward
        )
        if live.max(initial=0) > self.budget_bytes:
            return None
        transfers = self._time([c.gap for c in chosen], program, live)
        return assemble(program, transfers, Auto.name, self.budget_bytes)

    def _step_seconds(self, program: Program) -> Seconds:
        return np.array([self.seconds[step.op] for step in program.steps])

    def _offload_candidates(self, program: Program) -> list[Candidate]:
        candidates = []
        for gap in program.gaps:
            if may_leave(program, gap):
                nbytes = self.graph.tensors[gap.tensor].nbytes
                out, back = self.device.offload_seconds(nbytes), self.device.prefetch_seconds(nbytes)
                cost = (out + back) * self.device.transfer_compute_share + self.penalty[gap.tensor]
                candidates.append(Candidate(gap, nbytes, cost, out, back))
        return candidates

    def _recomputation(self, gap: Gap) -> Candidate | None:
        """The cost of making `gap`'s tensor again at the end of the gap, or None if what that needs would have to be kept."""
        graph, now = self.graph, gap.end
        pending, ops = [gap.tensor], set[int]()
        while pending:
            tensor = pending.pop()
            op = graph.ops[graph.producer[tensor]]
            if tensor not in op.recompute_writes:
                return None
            ops.add(op.id)
            for read in op.recompute_reads:
                kept = graph.tensors[read].persistent or graph.uses[read][-1] >= now or read in graph.outputs
                if not kept and graph.producer[read] not in ops:
                    pending.append(read)
        return Candidate(gap, graph.tensors[gap.tensor].nbytes, sum(self.seconds[op] for op in ops), recompute=True)

    def _too_large(self, program: Program, recompute: set[int]) -> set[int]:
        """Recomputed tensors that are made again where even with every gap used the budget is exceeded."""
        gaps = [gap for gap in program.gaps if may_leave(program, gap)]
        over = set(np.flatnonzero(program.live_bytes(gaps) > self.budget_bytes).tolist())
        around = {p + d for p in over for d in (-1, 0, 1)}
        return {gap.tensor for gap in program.gaps if gap.remade and gap.tensor in recompute and gap.end in around}

    def _time(self, gaps: Sequence[Gap], program: Program, live: Positions) -> list[Transfer]:
        """When each chosen tensor leaves and comes back; `live` has room for them only where the budget leaves it."""
        clock = np.concatenate([[0.0], np.cumsum(self._step_seconds(program))])
        live = live.copy()
        releases = self._releases(gaps, program, live, clock)
        issues = self._issues(gaps, program, live, clock, releases)
        return [Transfer(gap, gap.start + 1, releases[gap], issues[gap], gap.end) for gap in gaps]

    def _releases(self, gaps: Sequence[Gap], program: Program, live: Positions, clock: Seconds) -> dict[Gap, int]:
        """Each offload is awaited once it should be done, or before the first step that needs its memory."""
        releases: dict[Gap, int] = {}
        link_free = delay = 0.0
        stored: set[int] = set()
        for gap in sorted(gaps, key=lambda g: (g.start, g.tensor)):
            nbytes = self.graph.tensors[gap.tensor].nbytes
            first = gap.start + 1
            if gap.tensor in stored:  # the store has it: the device copy can go at once
                releases[gap] = first
                continue
            stored.add(gap.tensor)
            link_free = max(link_free, clock[first] + delay) + self.device.offload_seconds(nbytes)
            done = int(np.searchsorted(clock, link_free - delay))
            last = max(first, min(done, latest_release(program, gap)))
            full = np.flatnonzero(live[first:last] + nbytes > self.budget_bytes)
            releases[gap] = release = first + int(full[0]) if full.size else last
            live[first:release] += nbytes
            delay += max(0.0, link_free - (clock[release] + delay))
        return releases

    def _issues(
        self, gaps: Sequence[Gap], program: Program, live: Positions, clock: Seconds, releases: dict[Gap, int]
    ) -> dict[Gap, int]:
        """Each prefetch is issued as late as it arrives in time, later where there is no room, in the order of need."""
        wanted: dict[Gap, int] = {}
        next_start = float("inf")
        for gap in sorted(gaps, key=lambda g: (g.end, g.tensor), reverse=True):
            duration = ISSUE_MARGIN * self.device.prefetch_seconds(self.graph.tensors[gap.tensor].nbytes)
            next_start = min(clock[gap.end], next_start) - duration
            wanted[gap] = int(np.searchsorted(clock, next_start, side="right")) - 1
        issues: dict[Gap, int] = {}
        previous = 0
        for gap in sorted(gaps, key=lambda g: (g.end, g.tensor)):
            nbytes = self.graph.tensors[gap.tensor].nbytes
            first = min(max(wanted[gap], previous, earliest_return(program, gap), releases[gap]), gap.end)
            full = np.flatnonzero(live[first : gap.end] + nbytes > self.budget_bytes)
            issues[gap] = previous = first + int(full[-1]) + 1 if full.size else first
            live[issues[gap] : gap.end] += nbytes
        return issues
