"""`window`: swap by a window in bytes over coming uses of variables ("Out-of-core training ... adaptive window")."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import numpy as np

from overspill.core import Device, Graph, Schedule
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.fastest import fastest
from overspill.planning.floor import below
from overspill.planning.gaps import earliest_return, may_move, swappable_gaps
from overspill.planning.step_program import Gap, Positions, StepProgram
from overspill.policies.base import Policy
from overspill.policies.parameters import flag, size
from overspill_papers.planning.lru import evictions, smallest

WINDOWS = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 5 / 4, 3 / 2, 7 / 4, 2.0, 5 / 2)
"""The schedule-windows tried, as multiples of the peak without transfers; a variable counts at each of its uses."""


class Window(Policy):
    """Swap in the variables that the next `window_bytes` of uses need.

    It looks ahead over the variables in order of use. At each function (§3, Fig. 2): (a) variables that enter the
    window and are in the store are swapped in; (b) the oldest swap-outs are awaited, and their memory freed, until
    everything fits the budget; (c) after the function, its variables are swapped out, (d) except those that are never
    used again or are in the window already. A variable that is still there when it enters the window stays. The paper's
    variables are all tensors. Here they are those that may move, parameters and optimizer state among them where the
    graph allows it; the store is then their home.

    Departures: a tensor already in the store is not copied again, and a swap-out whose memory is never needed is not
    made. (Fig. 2 copies each. The paper's code, SwapInOutScheduler of sony/nnabla, cancels them as we do, except those
    left at the end of a step: see `every_step`.) Forward and backward are two graphs. So tensors that leave in forward
    are freed by its end, and tensors that backward reads return in it. `window_bytes` is set by hand in the paper.
    Without it, the fastest of fixed multiples of the graph's own peak is taken. So with more memory the same windows
    are tried, and none is slower.
    """

    name = "window"
    summary = "swap by a look-ahead window in bytes over all tensors in order of use"
    source = "Adaptive window-based scheduling, §3"
    offloads = True
    plans_for_budget = True
    placement = "chunked"
    moves_all = True
    parameters = (
        size("window", "window_bytes", "the schedule-window; not given, the fastest of some multiples of the peak"),
        flag("every_step", "every_step", "swap all that may leave in each step, as the paper does"),
    )

    def __init__(
        self, *, memory_optimal: bool = False, window_bytes: int | None = None, every_step: bool = False
    ) -> None:
        """Set the paper's schedule-window (`window_bytes`; None: tuned).

        With `every_step`, swaps are unconditional, as in the paper. At the end of each step every tensor that may leave
        does, even with free memory, and the next step swaps it in again.
        """
        super().__init__(memory_optimal=memory_optimal)
        self.window_bytes = window_bytes
        self.every_step = every_step

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = StepProgram(graph)
        live = program.live_bytes()
        peak = int(live.max(initial=0))
        if budget_bytes is None or (peak <= budget_bytes and not self.every_step):
            return assemble(program, (), self.name, budget_bytes)
        windows = [int(share * peak) for share in WINDOWS] if self.window_bytes is None else [self.window_bytes]
        sequence = VariableSequence(program)
        options = {window_bytes: sequence.swaps(window_bytes) for window_bytes in windows}
        candidates = self._candidates(program, options, live, budget_bytes)
        best = fastest(graph, device, seconds, candidates, budget_bytes)
        if best is None:
            raise below(smallest(program, options.values(), live), budget_bytes, self.name)
        return best

    def _candidates(
        self, program: StepProgram, options: Mapping[int, Mapping[Gap, int]], live: Positions, budget_bytes: int
    ) -> Iterator[Schedule]:
        for window_bytes, swaps in options.items():
            released = evictions(program, swaps, live, budget_bytes, emptied=self.every_step)
            if released is not None:
                chosen = self.spelled(window_bytes=window_bytes)
                yield assemble(program, _transfers(program, swaps, released), chosen, budget_bytes)


class VariableSequence:
    """The variables of a program in order of use, each as often as it is used (§3, Fig. 1)."""

    def __init__(self, program: StepProgram) -> None:
        tensors = program.graph.tensors
        uses: list[tuple[int, int]] = []  # (step, tensor)
        for position, step in enumerate(program.steps):
            reads, writes = program.reads_writes(step)
            uses += [(position, t) for t in dict.fromkeys(reads + writes) if may_move(tensors[t])]
        bytes_to = np.cumsum([0, *(tensors[t].nbytes for _, t in uses)])
        first_of = np.searchsorted([position for position, _ in uses], np.arange(program.length))
        self.start_bytes = bytes_to[first_of]  # bytes from the first use to the first of each step
        self.gaps = swappable_gaps(program)
        self.earliest = np.array([earliest_return(program, gap) for gap in self.gaps], dtype=np.int64)
        self.ends = np.array([gap.end for gap in self.gaps], dtype=np.int64)
        # Bytes from the first use to that at the end of each gap, with it; what is used no more is an output, which is
        # there at the end of the step.
        number = {use: i for i, use in enumerate(uses, 1)}
        used = [number.get((gap.end, gap.tensor)) for gap in self.gaps]
        self.end_bytes = np.array([bytes_to[-1] if i is None else bytes_to[i] for i in used], dtype=np.int64)
        self.outputs = np.array([i is None for i in used], dtype=bool)

    def swaps(self, window_bytes: int) -> dict[Gap, int]:
        """Return the gaps in which a tensor is swapped out, with the step before which it must be swapped in again.

        That is the first step whose window reaches the use at the end of the gap. The window of the use itself always
        has it.
        """
        reached = np.minimum(np.searchsorted(self.start_bytes, self.end_bytes - window_bytes), self.ends)
        seen = np.where(self.outputs, self.ends, reached)
        back = np.minimum(np.maximum(seen, self.earliest), self.ends)
        return {
            gap: step
            for gap, first, step in zip(self.gaps, seen.tolist(), back.tolist(), strict=True)
            if gap.wraps or first > gap.start
        }


def _transfers(program: StepProgram, swaps: Mapping[Gap, int], released: Mapping[Gap, int]) -> list[Transfer]:
    """Return transfers for the swap-outs that end with memory freed.

    Each copy starts after the first use that required it. A swap-out whose memory was not needed has still copied the
    tensor (Fig. 2c). That copy serves later ones until the tensor is updated. A transfer that starts in a graph of
    forward alone is awaited in it.
    """
    apart = not program.graph.whole_step
    copied: dict[tuple[int, int], Gap] = {}  # (tensor, updates so far) -> the swap-out that made the copy
    for gap in sorted(swaps, key=lambda g: g.start):
        copied.setdefault((gap.tensor, _updates(program, gap)), gap)
    found = []
    for gap, release in released.items():
        first = copied[gap.tensor, _updates(program, gap)]
        in_forward = apart and first.start < program.end_of_forward
        done = min(release, program.end_of_forward) if in_forward else release
        found.append(Transfer(gap, first.start + 1, release, swaps[gap], gap.end, done))
    return found


def _updates(program: StepProgram, gap: Gap) -> int:
    """Return the number of times the tensor has been written when `gap` begins."""
    return bisect_right(program.written[gap.tensor], gap.start)
