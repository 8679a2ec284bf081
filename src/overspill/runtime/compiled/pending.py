"""Calls whose backward is still to come: which of them have been there at once, of one model or of several.

A call is known by its node in the autograd graph. It is over when that node begins to run, unless autograd was told to
keep what it saved, or when the node is dropped with the call's outputs. Not when the node has run: for hooks of that
time autograd would keep the gradients that it was given.

Names private to PyTorch that this file relies on (2.11 to 2.14): `_get_current_graph_task_keep_graph`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

Part = tuple[int, ...]
"""What tells a part of the job apart from others, over compilations too: its model, and the parameters that it reads."""


class Kind(NamedTuple):
    """What tells a graph apart from others, over compilations too: its part of the job, and the kinds of its inputs."""

    part: Part
    inputs: tuple[Any, ...]


class PendingCalls:
    """Follows calls from forward to backward. `beside`: which others were there, at most, when one of a kind ran."""

    def __init__(self) -> None:
        self.beside: dict[Kind, Counter[Kind]] = {}
        self._alive: dict[weakref.ref[Node], Kind] = {}

    def __len__(self) -> int:
        """How many calls are pending."""
        return len(self._alive)

    def begin(self, node: Node, kind: Kind, before_backward: Callable[[weakref.ref[Node]], None]) -> None:
        """A call's forward has run; `before_backward` is called, with what tells the call apart, when its backward begins."""
        call = weakref.ref(node, self._over)
        self._alive[call] = kind

        def before(_given: Any) -> None:
            before_backward(call)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._over(call)

        node.register_prehook(before)

    def others(self, call: weakref.ref[Node] | None) -> Counter[Kind]:
        """The pending calls besides `call`, by their kinds."""
        alive = self._alive.copy()  # a node may be dropped at any moment
        return Counter(kind for ref, kind in alive.items() if ref is not call)

    def learn(self, kind: Kind, others: Counter[Kind]) -> None:
        """Calls `others` were there when one of `kind` ran."""
        self.beside[kind] = self.beside.get(kind, Counter()) | others

    def _over(self, call: weakref.ref[Node]) -> None:
        self._alive.pop(call, None)
