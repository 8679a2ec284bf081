"""Where the search of `auto` starts: with the recomputations that cost least for the bytes that they free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from overspill.core import Graph, Phase

PRICES = 24
"""How many prices of a byte are tried, in seconds, from that of the op that makes the cheapest group."""
DEAREST = 4
"""The highest price, in prices of the dearest op: a group that costs more with all that it needs again is kept."""
COARSE, FINE = 10, 3
"""Starts: this many shares of all bytes, and how often the space around the best of them is halved."""


@dataclass(frozen=True)
class Start:
    """Tensors to recompute, and tensors without later use to keep for that."""

    recompute: tuple[int, ...]
    kept: tuple[int, ...]


class Starts:
    """Sets of `groups` to recompute, the first `n` of them in order of their price.

    A group's price is the least at which a byte is worth the seconds that making the group again takes. That price
    decides which tensors are made again for it and which are kept. An input that nothing else needs is kept if its
    bytes are worth less than its recomputation.
    """

    def __init__(self, graph: Graph, seconds: Sequence[float], groups: Sequence[frozenset[int]]) -> None:
        self.graph, self.seconds = graph, seconds
        self.saved = frozenset[int]().union(*groups)
        self.forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self.made: list[tuple[float, float, int, frozenset[int], set[int]]] = []
        sizes = [sum(graph.tensors[t].nbytes for t in group) for group in groups]
        makers = [graph.producer[min(group)] for group in groups]
        own = [seconds[op] / max(1, size) for op, size in zip(makers, sizes, strict=True)]
        left = set(range(len(groups)))
        own = [price for price in own if price > 0]
        for price in np.geomspace(min(own), DEAREST * max(own), PRICES) if own else ():
            again = self._seconds_to_have(float(price))
            for number in sorted(left):
                took = seconds[makers[number]] + self._inputs_of(makers[number], again)
                if took <= price * sizes[number]:
                    left.remove(number)
                    kept = self._kept(makers[number], again, float(price))
                    self.made.append((float(price), took / sizes[number], number, groups[number], kept))
        self.made.sort(key=lambda made: made[:3])
        self.gains = [0, *accumulate(sizes[made[2]] for made in self.made)]

    def best(self, seconds_of: Callable[[Start], float]) -> None:
        """Try starts to find that of least `seconds_of`, which remembers it."""
        tried: dict[int, float] = {}

        def took(number: int) -> float:
            if number not in tried:
                tried[number] = seconds_of(self.first(number))
            return tried[number]

        places = [int(np.searchsorted(self.gains, share * self.gains[-1])) for share in np.linspace(0, 1, COARSE + 1)]
        best = min(places, key=took)
        step = len(self.made) / COARSE
        for _ in range(FINE):
            step /= 2
            around = [best, max(0, round(best - step)), min(len(self.made), round(best + step))]
            best = min(around, key=took)

    def first(self, count: int) -> Start:
        """Return the start that recomputes the `count` cheapest groups."""
        made = self.made[:count]
        recompute = sorted(t for *_, group, _ in made for t in group)
        return Start(tuple(recompute), tuple(sorted(set[int]().union(*(kept for *_, kept in made)))))

    def _seconds_to_have(self, price: float) -> dict[int, float]:
        """Return the seconds that it takes to have a tensor of forward again, if a byte that is kept costs `price`."""
        again: dict[int, float] = {}
        for op in self.forward:
            took = self.seconds[op.id] + self._inputs_of(op.id, again)
            for tensor in op.writes:
                if tensor in self.saved or self.graph.tensors[tensor].persistent:
                    continue
                remade = took if tensor in op.recompute_writes else float("inf")
                again[tensor] = min(remade, price * self.graph.tensors[tensor].nbytes)
        return again

    def _inputs_of(self, op: int, again: dict[int, float]) -> float:
        return sum(again.get(t, 0.0) for t in self.graph.ops[op].recompute_reads)

    def _kept(self, op: int, again: dict[int, float], price: float) -> set[int]:
        """Return the inputs of `op`, and of ops that run for it again, that are kept."""
        kept: set[int] = set()
        pending, seen = [op], {op}
        while pending:
            for tensor in self.graph.ops[pending.pop()].recompute_reads:
                if tensor not in again:
                    continue
                if again[tensor] == price * self.graph.tensors[tensor].nbytes:
                    kept.add(tensor)
                elif (maker := self.graph.producer[tensor]) not in seen:
                    seen.add(maker)
                    pending.append(maker)
        return kept
