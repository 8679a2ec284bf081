"""`lms`: swap tensors between uses far apart in the graph (Le et al., ISMM'19, TFLMS)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph, Schedule
from overspill.planning.assemble import assemble
from overspill.planning.fastest import fastest
from overspill.planning.floor import below
from overspill.planning.gaps import earliest_return, may_swap
from overspill.planning.step_program import Gap, Positions, StepProgram
from overspill.policies.base import Policy
from overspill.policies.parameters import number
from overspill_papers.planning.lru import evictions, smallest, transfers

THRESHOLDS = (0.0, 1 / 4, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 15 / 16)
"""The swapout_thresholds tried, as shares of the graph's depth."""
AHEADS = (0, 4, 12, 32)
"""The swapin_aheads tried, in levels."""
Swaps = Mapping[Gap, int]
"""The gaps in which tensors are swapped out, with the steps before which they are swapped in."""


class LargeModelSupport(Policy):
    """Swap a tensor out between two uses that are far apart.

    The distance is more than `threshold`, and the tensor starts back `ahead` of the later use. Distances are
    differences of topological levels. A swap-out starts right after the use and runs concurrently with later ops. Its
    memory is awaited where it is needed, as TensorFlow's allocator waits for it. A swap-in is put before the last op
    that is at least `ahead` levels below the use. Variables (parameters, optimizer state) stay, as in TensorFlow,
    except in a whole step. There they are tensors like all others, and their distance extends into the next step.

    Parameters that are not given are tuned by simulation, as by LMS's own tuner. The values tried depend on the graph
    alone. With less memory no swap-out's memory is awaited later, so more memory or a faster link is never slower.
    """

    name = "lms"
    summary = "swap out what is not used again within a distance in the graph"
    source = "Le et al., ISMM'19 (TFLMS); adaptive window §2"
    offloads = True
    plans_for_budget = True
    placement = "tensorflow"
    parameters = (
        number("threshold", "threshold", "swapout_threshold, in levels of the graph; not given, tuned"),
        number("ahead", "ahead", "swapin_ahead, in levels; not given, tuned"),
    )

    def __init__(self, *, memory_optimal: bool = False, threshold: int | None = None, ahead: int | None = None) -> None:
        """Set LMS's swapout_threshold (`threshold`) and swapin_ahead (`ahead`), both in levels; None: tuned."""
        super().__init__(memory_optimal=memory_optimal)
        self.threshold = threshold
        self.ahead = ahead

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        program = StepProgram(graph)
        live = program.live_bytes()
        if budget_bytes is None or live.max(initial=0) <= budget_bytes:
            return assemble(program, (), self.name, budget_bytes)
        level = levels(graph)
        depths = np.array([*level, max(level, default=0) + 1], dtype=np.int64)  # at the end, outputs are used once more
        options = dict(self._options(program, depths))
        candidates = self._candidates(program, options, live, budget_bytes)
        best = fastest(graph, device, seconds, candidates, budget_bytes)
        if best is None:
            raise below(smallest(program, options.values(), live), budget_bytes, self.name)
        return best

    def _thresholds(self, depths: NDArray[np.int64]) -> tuple[int, ...]:
        if self.threshold is not None:
            return (self.threshold,)
        return tuple(dict.fromkeys(int(share * depths[-1]) for share in THRESHOLDS))

    def _options(self, program: StepProgram, depths: NDArray[np.int64]) -> Iterator[tuple[tuple[int, int], Swaps]]:
        """Yield the pairs of hyperparameters with their distinct swaps, and when tensors return."""
        seen: set[frozenset[tuple[Gap, int]]] = set()
        for threshold in self._thresholds(depths):
            gaps = swapped(program, depths, threshold)
            for ahead in AHEADS if self.ahead is None else (self.ahead,):
                swaps = {gap: swap_in(program, depths, gap, ahead) for gap in gaps}
                key = frozenset(swaps.items())
                if key not in seen:
                    seen.add(key)
                    yield (threshold, ahead), swaps

    def _candidates(
        self, program: StepProgram, options: Mapping[tuple[int, int], Swaps], live: Positions, budget_bytes: int
    ) -> Iterator[Schedule]:
        for (threshold, ahead), swaps in options.items():
            released = evictions(program, swaps, live, budget_bytes, always=True)
            if released is not None:
                chosen = self.spelled(threshold=threshold, ahead=ahead)
                yield assemble(program, transfers(program, swaps, released), chosen, budget_bytes)


def swapped(program: StepProgram, depths: NDArray[np.int64], threshold: int) -> list[Gap]:
    """Return the gaps between uses further apart than `threshold`.

    Variables stay where forward and backward are two graphs.
    """
    graph = program.graph

    def distance(gap: Gap) -> int:
        return int(depths[gap.end] - depths[gap.start] + (depths[-1] if gap.wraps else 0))

    return [
        gap
        for gap in program.gaps
        if may_swap(program, gap)
        and (graph.whole_step or not graph.tensors[gap.tensor].persistent)
        and distance(gap) > threshold
    ]


def swap_in(program: StepProgram, depths: NDArray[np.int64], gap: Gap, ahead: int) -> int:
    """Return the step before which `gap`'s tensor is swapped in, the last one at least `ahead` below its use."""
    first = 0 if gap.wraps else gap.start + 1
    below_use = np.flatnonzero(depths[first : gap.end + 1] <= depths[gap.end] - ahead)
    found = first + int(below_use[-1]) if below_use.size else 0
    return max(found, earliest_return(program, gap))


def levels(graph: Graph) -> tuple[int, ...]:
    """Return the level of each op: the number of ops on the longest chain that it must wait for.

    An op waits for the last writer of its inputs. If it overwrites a tensor, it also waits for the earlier readers.
    """
    found: list[int] = []
    ready: dict[int, int] = {}  # tensor -> the level from which it may be read
    idle: dict[int, int] = {}  # tensor -> the level from which it may be written
    for op in graph.ops:
        level = max([0, *(ready.get(t, 0) for t in op.reads), *(idle.get(t, 0) for t in op.writes)])
        for tensor in (*op.reads, *op.writes):
            idle[tensor] = max(idle.get(tensor, 0), level + 1)
        for tensor in op.writes:
            ready[tensor] = level + 1
        found.append(level)
    return tuple(found)
