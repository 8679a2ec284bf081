"""What the search of `auto` decides, and the changes by which it goes from one decision to another."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from overspill.core import Device, Graph, Op

from .decoding import GapKeys, Seconds

FEW = 8
"""The most units that are changed at once, and how far from a stall one is changed."""


@dataclass(frozen=True)
class Decision:
    """What is left to choose: tensors to recompute, those among them `fleeting`, and what steers the greedy choice.

    `fleeting` are dropped again as soon as the op that wanted them has run. `dearer` are seconds that trips of a tensor
    cost more, by tensor, and behind them those of slower algorithms, by op; trips in the gaps `away` are made first.
    """

    recompute: frozenset[int]
    fleeting: frozenset[int]
    dearer: Seconds
    away: GapKeys

    def same_program(self, other: Decision) -> bool:
        """Whether the same tensors are recomputed, as often."""
        return self.recompute == other.recompute and self.fleeting == other.fleeting

    def steers_like(self, other: Decision) -> bool:
        """Whether what moves and what is slower is chosen by the same costs."""
        return self.dearer is other.dearer and self.away is other.away

    def recomputing(self, recompute: frozenset[int]) -> Decision:
        """This with other tensors recomputed; those that were fleeting stay so."""
        return replace(self, recompute=recompute, fleeting=self.fleeting & recompute)

    def dropping(self, fleeting: frozenset[int]) -> Decision:
        """This with other tensors fleeting."""
        return replace(self, fleeting=fleeting & self.recompute)


class Changes:
    """Decisions near another one: one of several kinds of change, drawn at random.

    `units` are tensors that are recomputed together, in the order in which they are made. `seconds[i]` is what op `i`
    takes with its fastest algorithm. `steering`: the share of changes of what moves and what takes slower algorithms,
    one to all others.
    """

    def __init__(
        self,
        graph: Graph,
        device: Device,
        units: Sequence[frozenset[int]],
        seconds: Sequence[float],
        steering: float,
        random: np.random.Generator,
    ) -> None:
        self.graph = graph
        self.random = random
        self.units = units
        links = [device.offload_seconds(t.nbytes) for t in graph.tensors]
        slower = [seconds[op.id] * (_slowest(op) - 1.0) for op in graph.ops]
        self.most_dearer = np.array(links + slower)
        kinds: list[tuple[float, Callable[[Decision, Seconds], Decision]]] = [
            (0.1, self._toggled),
            (0.2, self._near_a_stall),
            (0.3, self._swapped),
            (0.05, self._block),
            (0.25, self._one_fleeting),
            (0.05, self._block_of_fleeting),
            (0.2, self._alike),
            (steering, self._steered),
        ]
        self.kinds = kinds if units else kinds[-1:]
        self.bounds = np.cumsum([share for share, _ in self.kinds])

    def of(self, decision: Decision, lost: Seconds) -> Decision:
        """A change of `decision`, whose plan has `lost` these seconds (counted as `Decision.dearer` is)."""
        drawn = self.random.random() * self.bounds[-1]
        return self.kinds[int(np.searchsorted(self.bounds, drawn, side="right"))][1](decision, lost)

    # -- what is recomputed

    def _toggled(self, decision: Decision, lost: Seconds) -> Decision:
        """One or two units recomputed or no longer, anywhere."""
        del lost
        recompute = decision.recompute
        for _ in range(1 + int(self.random.integers(2))):
            recompute = _toggled(recompute, self._one_of(self.units))
        return decision.recomputing(recompute)

    def _near_a_stall(self, decision: Decision, lost: Seconds) -> Decision:
        """A unit recomputed or no longer that is used near a tensor that compute waits for, by how long it waits."""
        return decision.recomputing(_toggled(decision.recompute, self.units[self._place(lost)]))

    def _swapped(self, decision: Decision, lost: Seconds) -> Decision:
        """A unit recomputed in place of another near it, and mostly as fleeting as that was."""
        place = self._place(lost)
        here = self.units[max(place - FEW // 2, 0) : place + FEW // 2 + 1]
        dropped = [unit for unit in here if unit <= decision.recompute]
        kept = [unit for unit in here if not unit & decision.recompute]
        if not dropped or not kept:
            return self._toggled(decision, lost)
        old, new = self._one_of(dropped), self._one_of(kept)
        fleeting = decision.fleeting
        if old & fleeting or self.random.random() < 0.5:
            fleeting = fleeting - old | new
        return decision.recomputing(decision.recompute - old | new).dropping(fleeting)

    def _block(self, decision: Decision, lost: Seconds) -> Decision:
        """Some units that are made one after another, all recomputed or none."""
        del lost
        some, recompute = self._neighbours(), decision.recompute
        return decision.recomputing(recompute | some if self.random.random() < 0.5 else recompute - some)

    def _alike(self, decision: Decision, lost: Seconds) -> Decision:
        """Units like one another, as layers of a network are, all recomputed, or for every use, or no longer."""
        place = self._place(lost) if self.random.random() < 0.5 else int(self.random.integers(len(self.units)))
        alike = self.alike[place]
        most = 1 + int(len(alike) ** self.random.random())
        first = max(bisect_left(alike, place) - int(self.random.integers(most)), 0)
        every = 2 if most > 2 and self.random.random() < 0.3 else 1
        some = frozenset().union(*(self.units[i] for i in alike[first : first + most : every]))
        kind = self.random.random()
        if kind < 0.5:
            more = decision.recomputing(decision.recompute | some)
            return more.dropping(more.fleeting | some) if kind < 0.2 else more
        if kind < 0.75:
            return decision.recomputing(decision.recompute - some)
        return decision.dropping(decision.fleeting | some if kind < 0.875 else decision.fleeting - some)

    # -- what is dropped again at once

    def _one_fleeting(self, decision: Decision, lost: Seconds) -> Decision:
        """A unit that is recomputed for every use, or no longer."""
        recomputed = [unit for unit in self.units if unit <= decision.recompute]
        if not recomputed:
            return self._toggled(decision, lost)
        return decision.dropping(_toggled(decision.fleeting, self._one_of(recomputed)))

    def _block_of_fleeting(self, decision: Decision, lost: Seconds) -> Decision:
        """Some units that are made one after another, all recomputed for every use or none."""
        del lost
        some, fleeting = self._neighbours(), decision.fleeting
        return decision.dropping(fleeting | some if self.random.random() < 0.5 else fleeting - some)

    # -- what moves

    def _steered(self, decision: Decision, lost: Seconds) -> Decision:
        """Other costs of some trips and slower algorithms: those that are waited for dearer, or any; or without the hint."""
        kind = self.random.random()
        if kind < 0.3:
            return replace(decision, dearer=decision.dearer + self.random.random() * lost)
        if kind < 0.4 and decision.away.size:
            return replace(decision, away=decision.away[:0])
        dearer = decision.dearer.copy()
        count = max(1, int(len(dearer) / 10 ** (1 + 2 * self.random.random())))
        some = self.random.integers(len(dearer), size=count)
        dearer[some] = self.most_dearer[some] * self.random.random(count) * (self.random.random(count) < 0.7)
        return replace(decision, dearer=dearer)

    # -- where

    def _one_of(self, units: Sequence[frozenset[int]]) -> frozenset[int]:
        return units[int(self.random.integers(len(units)))]

    def _place(self, lost: Seconds) -> int:
        """The number of a unit near a stall, drawn by how long it is; any if there is none."""
        waited = np.cumsum(lost[: len(self.near)])
        if not waited[-1] > 0.0:
            return int(self.random.integers(len(self.units)))
        stalled = min(int(np.searchsorted(waited, self.random.random() * waited[-1], side="right")), len(waited) - 1)
        place = self.near[stalled] + int(self.random.integers(-FEW // 2, FEW // 2 + 1))
        return min(max(place, 0), len(self.units) - 1)

    def _neighbours(self) -> frozenset[int]:
        """The tensors of up to FEW units that are made one after another."""
        first, count = int(self.random.integers(len(self.units))), int(self.random.integers(2, FEW + 1))
        return frozenset().union(*self.units[first : first + count])

    @cached_property
    def alike(self) -> list[list[int]]:
        """For each unit the places of those like it, its own among them: of as many bytes, by the same kind of op."""
        graph = self.graph
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        kinds = [
            (graph.ops[graph.producer[min(unit)]].name, sum(graph.tensors[t].nbytes for t in unit))
            for unit in self.units
        ]
        for place, kind in enumerate(kinds):
            found[kind].append(place)
        return [found[kind] for kind in kinds]

    @cached_property
    def near(self) -> list[int]:
        """For each tensor the number of a unit that is used by the op in the middle of its uses, or next."""
        graph = self.graph
        used = {op: place for place, unit in enumerate(self.units) for tensor in unit for op in graph.uses[tensor]}
        ops = sorted(used)

        def place(uses: Collection[int]) -> int:
            middle = sorted(uses)[len(uses) // 2] if uses else 0
            return used[ops[min(bisect_left(ops, middle), len(ops) - 1)]]

        return [place(uses) for uses in graph.uses]


def _slowest(op: Op) -> float:
    """How much longer the slowest algorithm of `op` takes than its fastest."""
    return max((algorithm.slowdown for algorithm in op.algorithms), default=1.0)


def _toggled(chosen: frozenset[int], unit: frozenset[int]) -> frozenset[int]:
    """`chosen` without the unit if it has all of it, else with it."""
    return chosen - unit if unit <= chosen else chosen | unit
