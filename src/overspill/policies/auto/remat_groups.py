"""Groups of tensors that the search of `auto` recomputes together."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from overspill.core import Graph

from . import _search


@dataclass(frozen=True)
class RematGroups:
    """Tensors that are recomputed together, by group, in the order in which they are made."""

    graph: Graph
    tensors: tuple[frozenset[int], ...]

    @cached_property
    def native(self) -> _search.RematGroups:
        """The groups for native code."""
        return _search.RematGroups([sorted(group) for group in self.tensors], self.alike, self.near)

    @cached_property
    def alike(self) -> list[list[int]]:
        """For each group the numbers of all groups with the same size and op, its own included."""
        graph = self.graph
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        kinds = [
            (graph.ops[graph.producer[min(group)]].name, sum(graph.tensors[t].nbytes for t in group))
            for group in self.tensors
        ]
        for number, kind in enumerate(kinds):
            found[kind].append(number)
        return [found[kind] for kind in kinds]

    @cached_property
    def near(self) -> list[int]:
        """For each tensor the number of a group that is used nearby.

        It is used at the middle of the tensor's uses or next after that; 0 without groups.
        """
        uses_of = self.graph.uses
        used = {op: number for number, group in enumerate(self.tensors) for tensor in group for op in uses_of[tensor]}
        ops = sorted(used)

        def group_by(uses: Collection[int]) -> int:
            middle = sorted(uses)[len(uses) // 2] if uses else 0
            return used[ops[min(bisect_left(ops, middle), len(ops) - 1)]] if ops else 0

        return [group_by(uses) for uses in uses_of]


def by_op(graph: Graph, tensors: Iterable[int]) -> list[frozenset[int]]:
    """Return the outputs of each op among `tensors`, in the order of the ops."""
    found: dict[int, list[int]] = defaultdict(list)
    for tensor in tensors:
        found[graph.producer[tensor]].append(tensor)
    return [frozenset(found[op]) for op in sorted(found)]
