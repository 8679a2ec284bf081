"""Whether the loss that a graph returns is the only one that is made from its outputs.

Then a plan needs no room for a loss outside, nor for gradients of what the graph's own is made from. The first backward
shows it: autograd passes no gradients of these. Where nothing else fits, it is taken for granted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.capture.compiled.joint import JointGraph

from .pending_calls import GraphFrame, Part
from .planned import Planned
from .renewal import Renewal

WORTHWHILE = 1.01
"""Slowdown of a plan from which on a better one is worth planning anew."""


class OnlyLosses:
    """What is known of the losses of each part of the job. `reserved`: the user says what room a loss needs."""

    def __init__(self, renewal: Renewal, *, reserved: bool) -> None:
        self._renewal = renewal
        self._reserved = reserved
        self._known: dict[Part, bool] = {}

    def made_into(self, joint: JointGraph, frame: GraphFrame) -> frozenset[int]:
        """The outputs that the graph makes into a loss which it returns, where that may be the only one."""
        return frozenset() if self._reserved or frame.broken else joint.made_into_loss

    def is_only(self, joint: JointGraph, part: Part, frame: GraphFrame) -> bool:
        """Whether it is known that the graph returns the only loss."""
        return bool(self.made_into(joint, frame)) and self._known.get(part, False)

    def take_for_only(self, joint: JointGraph, part: Part, frame: GraphFrame) -> bool:
        """Take the loss that the graph returns for the only one; False if there is none, or another has been seen."""
        return bool(self.made_into(joint, frame)) and self._known.setdefault(part, True)

    def see_gradients(self, planned: Planned, given: Sequence[Any]) -> None:
        """Note the gradients that autograd passes to a backward."""
        is_only, known = all(given[i] is None for i in planned.made_into_loss), self._known.get(planned.part)
        if known is False or known is is_only:
            return
        self._known[planned.part] = is_only
        self._renewal.begin_rounds()
        if not is_only and planned.ends_in_loss:
            self._renewal.ask("makes a loss from outputs of a model that returns one itself")
        elif is_only and self._renewal.at_calls and planned.plan.slowdown > WORTHWHILE:
            # Its plan has room for another loss, and for gradients of what that is made from.
            self._renewal.is_asked = True
