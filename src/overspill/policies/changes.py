"""What the search of `auto` decides, and the changes by which it goes from one decision to another.

Twin of native/planning/changes.hpp, which draws the same changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .decoding import GapKeys, Seconds
from .randoms import Random
from .units import Units

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

    `most_dearer` are the most seconds that steering adds (counted as `Decision.dearer` is). `steering`: the share of changes
    of what moves and what takes slower algorithms, one to all others.
    """

    def __init__(self, units: Units, most_dearer: Seconds, steering: float, random: Random) -> None:
        self.units, self.alike, self.near = units.tensors, units.alike, units.near
        self.most_dearer, self.random = most_dearer, random
        self.kinds: list[tuple[float, Callable[[Decision, Seconds], Decision]]] = [
            (0.1, self._toggled),
            (0.2, self._near_a_stall),
            (0.3, self._swapped),
            (0.05, self._block),
            (0.25, self._one_fleeting),
            (0.05, self._block_of_fleeting),
            (0.2, self._alike),
            (steering, self._steered),
        ]

    def of(self, decision: Decision, lost: Seconds) -> Decision:
        """A change of `decision`, whose plan has `lost` these seconds (counted as `Decision.dearer` is)."""
        if not self.units:
            return self._steered(decision, lost)
        drawn = self.random.uniform() * sum(share for share, _ in self.kinds)
        bound = 0.0
        for share, kind in self.kinds:
            bound += share
            if drawn < bound:
                return kind(decision, lost)
        return decision

    # -- what is recomputed

    def _toggled(self, decision: Decision, lost: Seconds) -> Decision:
        """One or two units recomputed or no longer, anywhere."""
        del lost
        recompute = decision.recompute
        for _ in range(1 + self.random.below(2)):
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
        if old & fleeting or self.random.uniform() < 0.5:
            fleeting = fleeting - old | new
        return decision.recomputing(decision.recompute - old | new).dropping(fleeting)

    def _block(self, decision: Decision, lost: Seconds) -> Decision:
        """Some units that are made one after another, all recomputed or none."""
        del lost
        some, recompute = self._neighbours(), decision.recompute
        return decision.recomputing(recompute | some if self.random.uniform() < 0.5 else recompute - some)

    def _alike(self, decision: Decision, lost: Seconds) -> Decision:
        """Units like one another, as layers of a network are, all recomputed, or for every use, or no longer."""
        place = self._place(lost) if self.random.uniform() < 0.5 else self.random.below(len(self.units))
        alike = self.alike[place]
        most = 1 + int(len(alike) ** self.random.uniform())
        first = max(bisect_left(alike, place) - self.random.below(most), 0)
        every = 2 if most > 2 and self.random.uniform() < 0.3 else 1
        some = frozenset().union(*(self.units[i] for i in alike[first : first + most : every]))
        kind = self.random.uniform()
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
        return decision.dropping(fleeting | some if self.random.uniform() < 0.5 else fleeting - some)

    # -- what moves

    def _steered(self, decision: Decision, lost: Seconds) -> Decision:
        """Other costs of some trips and slower algorithms: those that are waited for dearer, or any; or without the hint."""
        kind = self.random.uniform()
        if kind < 0.3:
            return replace(decision, dearer=decision.dearer + self.random.uniform() * lost)
        if kind < 0.4 and decision.away.size:
            return replace(decision, away=decision.away[:0])
        dearer = decision.dearer.copy()
        for _ in range(max(1, int(len(dearer) / 10 ** (1 + 2 * self.random.uniform())))):
            one, share = self.random.below(len(dearer)), self.random.uniform()
            dearer[one] = share * self.most_dearer[one] if self.random.uniform() < 0.7 else 0.0
        return replace(decision, dearer=dearer)

    # -- where

    def _one_of(self, units: Sequence[frozenset[int]]) -> frozenset[int]:
        return units[self.random.below(len(units))]

    def _place(self, lost: Seconds) -> int:
        """The number of a unit near a stall, drawn by how long it is; any if there is none."""
        waited = lost[: len(self.near)].cumsum()
        if not waited[-1] > 0.0:
            return self.random.below(len(self.units))
        drawn = self.random.uniform() * waited[-1]
        stalled = min(int(waited.searchsorted(drawn, side="right")), len(waited) - 1)
        place = self.near[stalled] + self.random.below(FEW + 1) - FEW // 2
        return min(max(place, 0), len(self.units) - 1)

    def _neighbours(self) -> frozenset[int]:
        """The tensors of up to FEW units that are made one after another."""
        first = self.random.below(len(self.units))
        return frozenset().union(*self.units[first : first + 2 + self.random.below(FEW - 1)])


def _toggled(chosen: frozenset[int], unit: frozenset[int]) -> frozenset[int]:
    """`chosen` without the unit if it has all of it, else with it."""
    return chosen - unit if unit <= chosen else chosen | unit
