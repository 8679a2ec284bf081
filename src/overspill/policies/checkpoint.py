"""`checkpoint` and `checkpoint-cost`: recomputation in segments.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil, sqrt

import numpy as np

from overspill.core import Device, Graph, Phase, Schedule, TensorKind
from overspill.planning.assemble import assemble
from overspill.planning.floor import below, floor_of
from overspill.planning.step_program import Positions, StepProgram

from .base import Policy

SEGMENTS = (2, 3, 4, 6, 8, 16, 32)
"""Numbers of segments that `checkpoint-cost` tries, of equal bytes of feature maps."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the droppable bytes up to which it drops the cheapest segments."""


class Checkpoint(Policy):
    """Keep feature maps at about √n segment boundaries, recompute the rest (§4.1).

    A boundary is put where the fewest bytes cross, within half a segment of its even place. The last segment is kept,
    because backward begins with it. Ops that may not be recomputed (random numbers, mutation) keep their outputs as
    well.
    """

    name = "checkpoint"
    summary = "keep about sqrt(n) segment boundaries, recompute the rest"
    source = "Chen et al. 2016, §4.1"
    recomputes = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        cuts = _even_cuts(graph, _crossing_bytes(graph))
        dropped = [tensor for segment in _dropped(graph, cuts) for tensor in segment]
        return assemble(StepProgram(graph, dropped), (), self.name, budget_bytes)


class CheckpointCost(Policy):
    """Recompute segments of b bytes, as cheaply as possible (§4.2, Alg. 3).

    The sizes b come from a grid. A segment ends where the fewest bytes cross, between half of b and b. Chen et al.
    recompute every segment but the last. Here only those that free most bytes per second of recomputation are, up to
    fixed shares of all. The plan taken is the fastest that fits. The grid does not depend on the budget, so a larger
    budget is never slower.
    """

    name = "checkpoint-cost"
    summary = "recompute the segments that cost least, as many as the budget demands"
    source = "Chen et al. 2016, §4.2"
    recomputes = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        plain = StepProgram(graph)
        if budget_bytes is None or plain.live_bytes().max(initial=0) <= budget_bytes:
            return assemble(plain, (), self.name, budget_bytes)
        # Keep the fastest plan that fits, and the lowest floor for the error.
        best: tuple[float, StepProgram] | None = None
        least = floor_of(plain, {})
        for dropped in dropped_sets(graph, seconds):
            program = StepProgram(graph, dropped)
            peak = int(program.live_bytes().max(initial=0))
            step_seconds = float(program.durations(seconds).sum())
            if peak < least.nbytes:
                least = floor_of(program, {})
            if peak <= budget_bytes and (best is None or step_seconds < best[0]):
                best = step_seconds, program
        if best is None:
            raise below(least, budget_bytes, self.name)
        return assemble(best[1], (), self.name, budget_bytes)


def dropped_sets(graph: Graph, seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yield sets of tensors to drop, for all sizes of segments and shares."""
    crossing = _crossing_bytes(graph)
    tried: set[tuple[int, ...]] = set()
    for segments in SEGMENTS:
        dropped = [segment for segment in _dropped(graph, _cuts_by_bytes(graph, crossing, segments)) if segment]
        dropped.sort(key=lambda tensors: _seconds_per_byte(graph, tensors, seconds))
        total = sum(graph.tensors[t].nbytes for tensors in dropped for t in tensors)
        gains = list(accumulate(sum(graph.tensors[t].nbytes for t in tensors) for tensors in dropped))
        for share in SHARES:
            taken = dropped[: 1 + bisect_right(gains, share * total - 1)]
            recompute = tuple(sorted(tensor for tensors in taken for tensor in tensors))
            if recompute and recompute not in tried:
                tried.add(recompute)
                yield recompute


def _seconds_per_byte(graph: Graph, tensors: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds to recompute `tensors` at once, for each byte that dropping them frees."""
    ops = range(graph.producer[tensors[0]], graph.producer[tensors[-1]] + 1)
    spent = sum(seconds[op] for op in ops if graph.ops[op].recomputable)
    return spent / max(1, sum(graph.tensors[t].nbytes for t in tensors))


def _dropped(graph: Graph, cuts: Sequence[int]) -> list[list[int]]:
    """Return for each segment but the last its recomputable feature maps that do not cross its end, in order."""
    dropped: list[list[int]] = [[] for _ in cuts]
    for tensor, producer in sorted(graph.producer.items(), key=lambda item: item[1]):
        last = graph.last_forward_use(tensor)
        if graph.tensors[tensor].kind is not TensorKind.ACTIVATION or last is None:
            continue
        segment = bisect_right(cuts, producer)
        crosses = segment != bisect_right(cuts, last)
        if graph.may_recompute(tensor) and not crosses and segment < len(cuts) and tensor not in graph.outputs:
            dropped[segment].append(tensor)
    return dropped


def _crossing_bytes(graph: Graph) -> Positions:
    """Return for each op the bytes made in forward before it and read in forward at or after it."""
    crossing = np.zeros(len(graph.ops) + 2, dtype=np.int64)
    for tensor, producer in graph.producer.items():
        last = graph.last_forward_use(tensor)
        if last is not None and last > producer:
            crossing[producer + 1] += graph.tensors[tensor].nbytes
            crossing[last + 1] -= graph.tensors[tensor].nbytes
    return np.cumsum(crossing)


def _even_cuts(graph: Graph, crossing: Positions) -> list[int]:
    """Return the op ids before which forward is cut into about √(number of layers) segments."""
    forward = [op.id for op in graph.ops if op.phase is Phase.FORWARD]
    layers = len({graph.ops[i].layer for i in forward})
    segments = max(1, ceil(sqrt(layers)))
    if segments < 2 or len(forward) < 2 * segments:
        return []
    length = len(forward) / segments
    cuts = []
    for k in range(1, segments):
        window = forward[round((k - 0.5) * length) : round((k + 0.5) * length)]
        cuts.append(min(window, key=lambda op: (int(crossing[op]), abs(op - forward[round(k * length)]))))
    return sorted(set(cuts))


def _cuts_by_bytes(graph: Graph, crossing: Positions, segments: int) -> list[int]:
    """Return op ids that cut forward into segments of at most equal bytes (Alg. 3)."""
    forward = [op.id for op in graph.ops if op.phase is Phase.FORWARD]
    made = [
        sum(graph.tensors[t].nbytes for t in graph.ops[op].writes if graph.tensors[t].kind is TensorKind.ACTIVATION)
        for op in forward
    ]
    made_before = [0, *accumulate(made)]
    limit = made_before[-1] / segments
    # Cut where the fewest bytes cross, between half and all of the limit.
    cuts: list[int] = []
    begun = 0
    while made_before[-1] - made_before[begun] > limit:
        first = bisect_right(made_before, made_before[begun] + limit / 2, begun + 1)
        last = max(bisect_right(made_before, made_before[begun] + limit, first), first + 1)
        candidates = range(min(first, len(forward)), min(last, len(forward)))
        if not candidates:
            break
        begun = min(candidates, key=lambda at: (int(crossing[forward[at]]), -at))
        cuts.append(forward[begun])
    return cuts
