"""`dymem`: dependency-aware memory scheduling without barriers (Dymem: Yang and Cheng, HPDC'20)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from overspill.core import Device, Graph, LayerType, Schedule
from overspill.planning.algorithms import Choice, fastest_within, memory_optimal
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.fastest import fastest
from overspill.planning.floor import below, peak_of
from overspill.planning.order import depth_first, in_graph_order, reordered
from overspill.planning.step_program import Gap, Positions, StepProgram
from overspill.planning.timing import releases, where_memory_allows
from overspill.policies.base import Policy
from overspill_papers.planning.layers import layers_of, offload_step

STAYING = frozenset({LayerType.DROPOUT, LayerType.SOFTMAX, LayerType.LOSS, LayerType.LINEAR})
"""Layers whose inputs are not selected for offloading (§3.3.2: "Dropout, Softmax, and FC"); softmax comes with the
loss."""
RESIDENT_CONVOLUTIONS = 2
WORKSPACE_STEP_BYTES = 1 << 20
BUDGET_LEVELS = 6
UNLIMITED = 1 << 62


class Dymem(Policy):
    """Offload all layers' inputs, prefetch early, and give workspace the rest.

    Nothing waits for offloads. Prefetches are ahead within two convolutions. Ops run in Algorithm 1's order. An offload
    starts together with the last layer that reads the tensor. It is awaited when it should be done, sooner only where
    memory is short, and at the latest at the end of forward (§3.2.1). When a layer's backward starts, Algorithm 2 finds
    the tensors to prefetch. They are awaited where they are needed (§3.2.2). Each convolution takes the fastest
    algorithm whose workspace fits next to the activations (§4.2).

    A plan for more memory may wait at other steps and be slower. So plans are made for a series of memory sizes that
    does not depend on the budget, from the least that works to one with no shortage. The fastest of those within the
    budget is taken, so a larger budget chooses among more. (A plan for the budget itself would break this, since the
    next larger budget would not include it.) Without a budget the limit is the device's memory.
    """

    name = "dymem"
    summary = "offload all inputs without barriers, prefetch within two convolutions, fit workspaces"
    source = "Dymem §3.1, §3.2, §4.2"
    offloads = True
    plans_for_budget = True
    placement = "gtbm"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        limit = device.usable_bytes if budget_bytes is None else budget_bytes
        order = depth_first(graph)
        planner = Planner(reordered(graph, order), device, [seconds[op] for op in order])
        best = fastest(planner.graph, device, planner.seconds, planner.plans_by_budget(limit), None)  # none is over it
        if best is None:
            least = planner.schedule(planner.floor_bytes)
            raise below(peak_of(planner.graph, least), limit, self.name)
        return in_graph_order(replace(best, budget_bytes=budget_bytes), order)


class Planner:
    """Plans for one graph under different memory sizes."""

    def __init__(self, graph: Graph, device: Device, seconds: Sequence[float]) -> None:
        self.graph = graph
        self.device = device
        self.seconds = seconds
        self.least: Choice = memory_optimal(graph)
        self.program = StepProgram(graph, algorithms=self.least)
        layers = layers_of(self.program)
        away = [gap for layer in layers if layer.type not in STAYING for gap in layer.inputs]
        self.wanted = prefetch_starts(self.program, away)
        self.offloads = {gap: offload_step(self.program, gap) for gap in self.wanted}
        self.live = self.program.live_bytes(self.wanted)
        self.floor_bytes = int(self.live.max(initial=graph.persistent_bytes))

    def plans_by_budget(self, limit: int) -> Iterator[Schedule]:
        """Yield the plans of that series for at most `limit` bytes."""
        if self.floor_bytes > limit:
            return
        unlimited = self.schedule(UNLIMITED)
        top = peak_of(self.graph, unlimited).nbytes
        for size in sorted(
            {self.floor_bytes + (top - self.floor_bytes) * level // BUDGET_LEVELS for level in range(BUDGET_LEVELS)}
        ):
            if size <= limit:
                yield self.schedule(size)
        if top <= limit:
            yield unlimited

    def schedule(self, size: int) -> Schedule:
        """Return the plan for `size` bytes, which must be at least the floor.

        Activations come before workspace. Transfers are placed with the least workspaces, and the memory left goes to
        faster algorithms. These shorten the times by which transfers are placed, so it is done twice. In the end
        workspace fits the memory that is really free.
        """
        choice: Choice = dict.fromkeys(self.least, 0)
        for _ in range(2):
            transfers, live = self._transfers(choice, size)
            again = self._workspaces(live, size)
            if again == choice:
                break
            choice = again
        return assemble(self.program.with_algorithms(choice), transfers, Dymem.name, None)

    def _transfers(self, choice: Choice, size: int) -> tuple[list[Transfer], Positions]:
        """Return transfers that fit with the least workspaces, and the live bytes, with the op times of `choice`."""
        live = self.live.copy()
        clock = self.program.with_algorithms(choice).clock(self.seconds)
        released = releases(self.program, self.wanted, live, clock, self.device, size, self.offloads)
        issued = where_memory_allows(self.program, self.wanted, live, size, released)
        transfers = [Transfer(gap, self.offloads[gap], released[gap], issued[gap], gap.end) for gap in self.wanted]
        return transfers, live

    def _workspaces(self, live: Positions, size: int) -> dict[int, int]:
        """Return the fastest algorithm that fits the memory left, for each op with a choice.

        The search has steps of 1 MiB (§4.2).
        """
        found = {}
        for position, step in enumerate(self.program.steps):
            if step.op in self.least:
                op = self.program.op(step)
                room = size - (int(live[position]) - op.workspace_of(self.least[step.op]))
                found[step.op] = fastest_within(op, room // WORKSPACE_STEP_BYTES * WORKSPACE_STEP_BYTES)
        return found


def prefetch_starts(program: StepProgram, gaps: Collection[Gap]) -> dict[Gap, int]:
    """Return the steps at which Algorithm 2 starts each prefetch.

    These are of the tensors away in `gaps`; for others, the steps where they are needed. As each layer's backward
    starts, the search goes through the layers that follow in backward. It takes the offloaded ones whose prefetch has
    not started. It ends at the convolution that would be the third on the device, the current one included.

    The paper's pseudo-code has errors. Line 7 loops on `id`, and line 9 pushes it, where `next` is meant. Line 8 does
    not test whether the convolution was offloaded and not yet prefetched, as line 11 does for the others. The loop runs
    on to the first layer, against the text: tensors prefetched "too far away" waste memory.
    """
    turns = _turns(program)
    needed: dict[int, list[Gap]] = defaultdict(list)  # gaps by the turn at which they end
    begins = [turn.begin for turn in turns]
    for gap in gaps:
        needed[bisect_right(begins, gap.end) - 1].append(gap)
    found = {gap: gap.end for gap in gaps}
    end = convolutions = (
        0  # the search has been as far as turn `end`, past so many convolutions from the current one on
    )
    # Prefetch what the next turns need, up to the allowed number of convolutions.
    for current in turns:
        while end < len(turns) and convolutions + turns[end].conv <= RESIDENT_CONVOLUTIONS:
            convolutions += turns[end].conv
            found.update((gap, current.begin) for gap in needed[end])
            end += 1
        convolutions -= current.conv
    return found


@dataclass
class _Turn:
    """A layer's consecutive steps in backward, from `begin`. `conv` counts it if it is a convolution."""

    layer: str
    begin: int
    conv: int = 0


def _turns(program: StepProgram) -> list[_Turn]:
    """Return the layers in the order of backward. A layer that forward calls several times has as many turns."""
    turns: list[_Turn] = []
    for position in range(program.end_of_forward, program.end_of_backward):
        op = program.op(program.steps[position])
        if not turns or turns[-1].layer != op.layer:
            turns.append(_Turn(op.layer, position))
        if op.layer_type is LayerType.CONV:
            turns[-1].conv = 1
    return turns
