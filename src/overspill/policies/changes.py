"""What the search of `auto` decides, and the changes by which it goes from one decision to another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from overspill.core import Device, Graph

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

    def recomputing(self, recompute: frozenset[int]) -> Decision:
        """This with other tensors recomputed; those that were fleeting stay so."""
        return replace(self, recompute=recompute, fleeting=self.fleeting & recompute)

    def dropping(self, fleeting: frozenset[int]) -> Decision:
        """This with other tensors fleeting."""
        return replace(self, fleeting=fleeting & self.recompute)


class Changes:
    """Decisions near another one: one of several kinds of change, drawn at random.

    `units` are tensors that are recomputed together, in the order in which they are made.
    """

    def __init__(
        self, graph: Graph, device: Device, units: Sequence[frozenset[int]], random: np.random.Generator
    ) -> None:
        self.graph = graph
        self.random = random
        self.units = units
        self.link_seconds = np.array([device.offload_seconds(t.nbytes) for t in graph.tensors] + [0.0] * len(graph.ops))
        kinds: list[tuple[float, Callable[[Decision, Seconds], Decision]]] = [
            (0.1, self._toggled),
            (0.2, self._near_a_stall),
            (0.3, self._swapped),
            (0.05, self._block),
            (0.25, self._one_fleeting),
            (0.05, self._block_of_fleeting),
            (0.05, self._steered),
        ]
        self.kinds = kinds if units else kinds[-1:]
        self.bounds = np.cumsum([share for share, _ in self.kinds])

    def steer(self, share: float, seconds: Sequence[float]) -> None:
        """Draw costs of trips by this share, one to all other changes, and costs of ops' slower algorithms as well."""
        ops = self.graph.ops
        for op in ops:
            slowest = max((a.slowdown for a in op.algorithms), default=1.0)
            self.link_seconds[op.id - len(ops)] = seconds[op.id] * (slowest - 1.0)
        self.bounds[-1] = (self.bounds[-2] if len(self.kinds) > 1 else 0.0) + share

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
        """Other costs of some trips: those that are waited for dearer, or any; or without the hint."""
        kind = self.random.random()
        if kind < 0.3:
            return replace(decision, dearer=decision.dearer + self.random.random() * lost)
        if kind < 0.4 and decision.away.size:
            return replace(decision, away=decision.away[:0])
        dearer = decision.dearer.copy()
        count = max(1, int(len(dearer) / 10 ** (1 + 2 * self.random.random())))
        some = self.random.integers(len(dearer), size=count)
        dearer[some] = self.link_seconds[some] * self.random.random(count) * (self.random.random(count) < 0.7)
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
    def near(self) -> list[int]:
        """For each tensor the number of a unit that is used by the op in the middle of its uses, or next."""
        graph = self.graph
        used = {op: place for place, unit in enumerate(self.units) for tensor in unit for op in graph.uses[tensor]}
        ops = sorted(used)

        def place(uses: Collection[int]) -> int:
            middle = sorted(uses)[len(uses) // 2] if uses else 0
            return used[ops[min(bisect_left(ops, middle), len(ops) - 1)]]

        return [place(uses) for uses in graph.uses]


def _toggled(chosen: frozenset[int], unit: frozenset[int]) -> frozenset[int]:
    """`chosen` without the unit if it has all of it, else with it."""
    return chosen - unit if unit <= chosen else chosen | unit
