"""`checkpoint`: sublinear memory by recomputation (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np

from overspill.core import Device, Graph, Phase, Schedule, TensorKind

from .assemble import assemble
from .base import Policy
from .program import Program


class Checkpoint(Policy):
    """Keep what crosses about √n segment boundaries of n layers; recompute the rest segment by segment (§4.1).

    A boundary is put where the fewest bytes cross, within half a segment of its even place. The last segment is kept,
    for backward begins with it. What may not be recomputed (random numbers, mutation) is kept as well.
    """

    name = "checkpoint"
    summary = "keep about sqrt(n) segment boundaries, recompute the rest"
    source = "Chen et al. 2016, §4.1"
    recomputes = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        forward = [op.id for op in graph.ops if op.phase is Phase.FORWARD]
        cuts = _cuts(graph, forward)
        dropped = []
        for tensor in graph.tensors:
            last = graph.last_forward_use(tensor.id)
            if tensor.kind is not TensorKind.ACTIVATION or last is None:
                continue
            segment = sum(cut <= graph.producer[tensor.id] for cut in cuts)
            crosses = segment != sum(cut <= last for cut in cuts)
            recomputable = tensor.id in graph.ops[graph.producer[tensor.id]].recompute_writes
            if recomputable and not crosses and segment < len(cuts) and tensor.id not in graph.outputs:
                dropped.append(tensor.id)
        return assemble(Program(graph, dropped), (), self.name, budget_bytes)


def _cuts(graph: Graph, forward: list[int]) -> list[int]:
    """The op ids before which forward is cut into about √(number of layers) segments."""
    layers = len({graph.ops[i].layer for i in forward})
    segments = max(1, ceil(sqrt(layers)))
    if segments < 2 or len(forward) < 2 * segments:
        return []
    crossing = np.zeros(len(graph.ops) + 1, dtype=np.int64)  # bytes made before op i and read in forward at or after it
    for tensor, producer in graph.producer.items():
        last = graph.last_forward_use(tensor)
        if last is not None and last > producer:
            crossing[producer + 1] += graph.tensors[tensor].nbytes
            crossing[last + 1] -= graph.tensors[tensor].nbytes
    crossing = np.cumsum(crossing)
    length = len(forward) / segments
    cuts = []
    for k in range(1, segments):
        window = forward[round((k - 0.5) * length) : round((k + 0.5) * length)]
        cuts.append(min(window, key=lambda op: (int(crossing[op]), abs(op - forward[round(k * length)]))))
    return sorted(set(cuts))
