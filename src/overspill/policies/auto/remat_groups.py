"""What the search of `auto` recomputes together, and what it knows of that before it begins."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from overspill.core import Device, Graph

from . import _search
from .native import Seconds


@dataclass(frozen=True)
class Units:
    """Tensors that are recomputed together, by unit, in the order in which they are made."""

    graph: Graph
    tensors: tuple[frozenset[int], ...]

    @cached_property
    def native(self) -> _search.Units:
        """The same for native code."""
        return _search.Units([sorted(unit) for unit in self.tensors], self.alike, self.near)

    @cached_property
    def alike(self) -> list[list[int]]:
        """For each unit the numbers of those like it, its own among them: of as many bytes, by the same kind of op."""
        graph = self.graph
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        kinds = [
            (graph.ops[graph.producer[min(unit)]].name, sum(graph.tensors[t].nbytes for t in unit))
            for unit in self.tensors
        ]
        for number, kind in enumerate(kinds):
            found[kind].append(number)
        return [found[kind] for kind in kinds]

    @cached_property
    def near(self) -> list[int]:
        """For each tensor the number of a unit that is used by the op in the middle of its uses, or next; 0 without units."""
        uses_of = self.graph.uses
        used = {op: number for number, unit in enumerate(self.tensors) for tensor in unit for op in uses_of[tensor]}
        ops = sorted(used)

        def unit_by(uses: Collection[int]) -> int:
            middle = sorted(uses)[len(uses) // 2] if uses else 0
            return used[ops[min(bisect_left(ops, middle), len(ops) - 1)]] if ops else 0

        return [unit_by(uses) for uses in uses_of]


def by_op(graph: Graph, tensors: Iterable[int]) -> list[frozenset[int]]:
    """The outputs of each op among `tensors`, in the order of the ops."""
    found: dict[int, list[int]] = defaultdict(list)
    for tensor in tensors:
        found[graph.producer[tensor]].append(tensor)
    return [frozenset(found[op]) for op in sorted(found)]


def most_dearer(graph: Graph, device: Device, seconds: Sequence[float]) -> Seconds:
    """The most seconds that trips of a tensor are made dearer by, by tensor, and behind them slower algorithms, by op.

    `seconds[i]` is what op `i` takes with its fastest algorithm. Twin of `Planner::most_dearer` in native/search/.
    """
    links = [device.offload_seconds(t.nbytes) for t in graph.tensors]
    slowest = (max((algorithm.slowdown for algorithm in op.algorithms), default=1.0) for op in graph.ops)
    return np.array(links + [seconds[op] * (slowdown - 1.0) for op, slowdown in enumerate(slowest)])
