"""Measured op times: a lowered graph in which every op is timed, and the MeasuredTimes that a run of it gives."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import torch
from torch import fx

from overspill.core import Graph
from overspill.costs import MeasuredTimes, signature

from .lower import OP_ID


class OpTimer:
    """Collects the seconds of each op of one graph over a run; the first call of each op (warm-up) does not count."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._begun = 0.0

    def instrument(self, module: fx.GraphModule) -> None:
        """Put the timer's calls around every op of a lowered graph."""
        for node in list(module.graph.nodes):
            if (op := node.meta.get(OP_ID)) is not None:
                with module.graph.inserting_before(node):
                    module.graph.call_function(self._start)
                with module.graph.inserting_after(node):
                    module.graph.call_function(self._stop, (op,))

    def times(self, device_name: str) -> MeasuredTimes:
        """The median seconds of each kind of op."""
        by_signature: dict[str, list[float]] = defaultdict(list)
        for op, seconds in self._seconds.items():
            by_signature[signature(self._graph, self._graph.ops[op])] += seconds[1:] or seconds
        return MeasuredTimes(device_name, {key: statistics.median(found) for key, found in by_signature.items()})

    def _start(self) -> None:
        self._synchronize()
        self._begun = time.perf_counter()

    def _stop(self, op: int) -> None:
        self._synchronize()
        self._seconds[op].append(time.perf_counter() - self._begun)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
