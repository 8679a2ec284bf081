"""Measure op times in a run of a lowered program."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overspill.core import Graph
from overspill.costs import MeasuredTimes, signature

from .driver import LoweredProgram
from .emitter import OP_ID


class OpTimer:
    """Collects the seconds of each op over a run.

    The first call of each op (warm-up) does not count. On CUDA, events time an op on the device, after all work queued
    before it. To wait for the device around each op would measure the wait. The launch is included only if the queue
    has run empty.
    """

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._events: list[tuple[int, Any, Any]] = []
        self._begun: Any = None

    def instrument(self, program: LoweredProgram) -> None:
        """Time every op of `program`."""
        program.instructions = program.wrapped(self._timed)

    def _timed(self, node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
        op = node.meta.get(OP_ID)
        if op is None:
            return target

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._start()
            found = target(*args, **kwargs)
            self._stop(op)
            return found

        return timed

    def times(self, device_name: str) -> MeasuredTimes:
        """Return the median seconds of each kind of op."""
        for op, begun, ended in self._events:
            ended.synchronize()
            self._seconds[op].append(begun.elapsed_time(ended) / 1e3)
        self._events.clear()
        by_signature: dict[str, list[float]] = defaultdict(list)
        for op, seconds in self._seconds.items():
            by_signature[signature(self._graph, self._graph.ops[op])] += seconds[1:] or seconds
        return MeasuredTimes(device_name, {key: statistics.median(found) for key, found in by_signature.items()})

    def _start(self) -> None:
        self._begun = self._mark()

    def _stop(self, op: int) -> None:
        if self._device.type == "cuda":
            self._events.append((op, self._begun, self._mark()))
        else:
            self._seconds[op].append(self._mark() - self._begun)

    def _mark(self) -> Any:
        """Return the present time: a CUDA event after all queued work, or seconds of the CPU."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
