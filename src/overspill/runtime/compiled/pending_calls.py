"""Calls whose backward is still to come, of one model or several.

A call is known by its node in the autograd graph. It is over when that node begins to run, unless autograd was asked to
retain the graph, or when the node is dropped with the call's outputs. Not when the node has run: a hook at that time
would make autograd keep the incoming gradients.
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
    """Key of a graph that survives recompilation: its part, and its inputs' kinds."""

    part: Part
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class GraphFrame:
    """Which graph of the model: Dynamo's frame id, and whether a graph break follows."""

    id: int
    broken: bool


class PendingCalls:
    """Follows calls from forward to backward.

    `beside`: for each kind of call, the most others that were pending when it ran.
    """

    def __init__(self) -> None:
        self.beside: dict[GraphKey, Counter[GraphKey]] = {}
        self._alive: dict[weakref.ref[Node], GraphKey] = {}

    def __len__(self) -> int:
        """The number of pending calls."""
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
        """Pending calls other than `call`, counted by kind."""
        alive = self._alive.copy()  # a node may be dropped at any moment
        return Counter(kind for ref, kind in alive.items() if ref is not call)

    def learn(self, kind: GraphKey, others: Counter[GraphKey]) -> None:
        """Record that `others` were pending when a call of `kind` ran."""
        self.beside[kind] = self.beside.get(kind, Counter()) | others

    def _over(self, call: weakref.ref[Node]) -> None:
        self._alive.pop(call, None)
