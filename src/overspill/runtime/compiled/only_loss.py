"""Whether the loss that a graph returns is the only one made from its outputs.

Then a plan reserves no memory for a loss outside, nor for gradients of the outputs that the graph's own loss is made
from. The first backward shows it: autograd passes no such gradients. If nothing else fits, it is assumed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.capture.compiled.joint import JointGraph

from .pending_calls import GraphFrame, Part
from .planned import Planned
from .renewal import Renewal

WORTHWHILE = 1.01
"""Slowdown of a plan from which a better one is worth planning again."""


class OnlyLosses:
    """Facts about the losses of each part of the job.

    `reserved` is set if the user says how many bytes a loss needs.
    """

    def __init__(self, renewal: Renewal, *, reserved: bool) -> None:
        self._renewal = renewal
        self._reserved = reserved
        self._known: dict[Part, bool] = {}

    def made_into(self, joint: JointGraph, frame: GraphFrame) -> frozenset[int]:
        """Return the outputs that the graph makes into a loss it returns, if that may be the only loss."""
        return frozenset() if self._reserved or frame.broken else joint.made_into_loss

    def is_only(self, joint: JointGraph, part: Part, frame: GraphFrame) -> bool:
        """Return whether the graph is known to return the only loss."""
        return bool(self.made_into(joint, frame)) and self._known.get(part, False)

    def take_for_only(self, joint: JointGraph, part: Part, frame: GraphFrame) -> bool:
        """Assume that the loss which the graph returns is the only one.

        Returns False if it returns none, or another has been seen.
        """
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
        elif is_only and planned.plan.slowdown > WORTHWHILE:
            # Its plan has room for another loss, and for gradients of what that is made from.
            self._renewal.is_asked = True
