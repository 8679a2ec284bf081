"""A policy of one's own, in two versions, beside those of the papers: docs/howto/write_a_policy.md explains it.

python examples/12_a_policy.py      # needs overspill[papers]
"""

import overspill
from overspill.core import Device, Graph, Schedule
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.floor import below, floor_of
from overspill.planning.gaps import saved_gaps
from overspill.planning.step_program import StepProgram
from overspill.planning.timing import releases, where_memory_allows
from overspill.policies import POLICIES, Policy


class LargestFirst(Policy):
    """Swap the largest feature maps, as many as the budget asks for; compute waits for each copy."""

    name = "largest-first"
    summary = "swap the largest feature maps, and wait"
    source = "examples/12_a_policy.py"
    offloads = plans_for_budget = True
    waits = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = StepProgram(graph)
        limit = device.usable_bytes if budget_bytes is None else budget_bytes
        by_size = sorted(saved_gaps(program).values(), key=lambda gap: -graph.tensors[gap.tensor].nbytes)
        for count in range(len(by_size) + 1):
            gaps = by_size[:count]
            live = program.live_bytes(gaps)  # at each step, with these tensors away
            if live.max(initial=0) <= limit:
                if self.waits:
                    transfers = [Transfer(gap, gap.start + 1, gap.start + 1, gap.end, gap.end) for gap in gaps]
                else:
                    # Memory goes when the copy should be done, and is asked for ten steps early, if there is room.
                    released = releases(program, gaps, live, program.clock(seconds), device, limit)
                    issued = where_memory_allows(program, {g: g.end - 10 for g in gaps}, live, limit, released)
                    transfers = [Transfer(gap, gap.start + 1, released[gap], issued[gap], gap.end) for gap in gaps]
                return assemble(program, transfers, self.name, budget_bytes)
        raise below(floor_of(program, {gap: gap.end for gap in by_size}), limit, self.name)


class LargestFirstAhead(LargestFirst):
    """The same tensors, copied beside compute."""

    name = "largest-first-ahead"
    summary = "swap the largest feature maps beside compute"
    waits = False


for policy in (LargestFirst, LargestFirstAhead):
    POLICIES.register(policy.name, policy)
names = ("largest-first", "largest-first-ahead", "vdnn-conv", "auto")
for row in overspill.compare("resnet18", batch=64, device="rtx3060", budget=0.7, policies=names):
    waits = f"waits most for {row.stall_cause}" if row.stall_cause else "waits for nothing"
    print(
        f"{row.policy:20s} simulated slowdown {row.slowdown:.3f}, {waits}" if row.plan else f"{row.policy}: {row.error}"
    )
