"""Calls whose backward is still to come, of one model or several.

A call is known by its node in the autograd graph. It is over when that node begins to run, unless autograd retains the
graph. It is also over when the node is dropped with the outputs of the call. The end of the node's run would be too
late: a hook at that time would make autograd keep the incoming gradients.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from overspill.pytorch.autograd import keeps_graph

Part = tuple[int, ...]
"""Key of a part of the job that survives recompilation: its model, and the parameters that it reads."""


class GraphKey(NamedTuple):
    """Key of a graph that survives recompilation."""

    part: Part
    """The part of the job."""
    inputs: tuple[Any, ...]
    """Kinds of the inputs."""


@dataclass(frozen=True)
class GraphFrame:
    """Identifies a graph of the model."""

    id: int
    """Dynamo's frame id."""
    broken: bool
    """Whether a graph break follows."""


class PendingCalls:
    """Tracks calls from forward to backward.

    `beside` has, for each kind of call, the most other calls that were pending when it ran.
    """

    def __init__(self) -> None:
        self.beside: dict[GraphKey, Counter[GraphKey]] = {}
        self._alive: dict[weakref.ref[Node], GraphKey] = {}

    def __len__(self) -> int:
        """Return the number of pending calls."""
        return len(self._alive)

    def begin(self, node: Node, kind: GraphKey, before_backward: Callable[[weakref.ref[Node]], None]) -> None:
        """Add a call whose forward has run.

        `before_backward` is called with the call's reference when its backward begins.
        """
        call = weakref.ref(node, self._over)
        self._alive[call] = kind

        def before(_given: Any) -> None:
            before_backward(call)
            if not keeps_graph():
                self._over(call)

        node.register_prehook(before)

    def others(self, call: weakref.ref[Node] | None) -> Counter[GraphKey]:
        """Return the pending calls other than `call`, counted by kind."""
        alive = self._alive.copy()  # a node may be dropped at any moment
        return Counter(kind for ref, kind in alive.items() if ref is not call)

    def learn(self, kind: GraphKey, others: Counter[GraphKey]) -> None:
        """Record that `others` were pending when a call of `kind` ran."""
        self.beside[kind] = self.beside.get(kind, Counter()) | others

    def _over(self, call: weakref.ref[Node]) -> None:
        self._alive.pop(call, None)
