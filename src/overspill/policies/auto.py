"""`auto`: under a byte budget, keep, offload or recompute each tensor so that the simulated step is short."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from overspill.core import Device, Graph, Schedule
from overspill.simulate import simulate

from .assemble import assemble
from .base import Policy, may_leave, saved_gaps
from .floor import infeasible
from .program import Gap, Program
from .select import Candidate, select
from .timing import timed

NEGLIGIBLE_STALLS = 0.002
"""A plan that waits for transfers for a smaller share of its ops' time is not worth another attempt."""
ROUNDS = 4
BUDGET_SHARES = (1.0, 0.95, 0.85)


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
            program.durations(self.seconds),
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
            program.live_bytes(), program.durations(self.seconds), offloads, self.budget_bytes, program.end_of_forward
        )
        if live.max(initial=0) > self.budget_bytes:
            return None
        transfers = timed(program, [c.gap for c in chosen], live, self.seconds, self.device, self.budget_bytes)
        return assemble(program, transfers, Auto.name, self.budget_bytes)

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
