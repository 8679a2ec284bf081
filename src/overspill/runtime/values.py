"""Variables of an emitted graph that hold the values of captured nodes.

Variables of its roots hold a storage. Views cost nothing: they are made again from these when needed.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import StorageKey, storages
from overspill.core.errors import InvalidScheduleError

from .views import reshaped, same_as


class Values(dict[fx.Node, fx.Node]):
    """The variables of `graph`, by the captured root that each holds now."""

    def __init__(self, captured: Captured, graph: fx.Graph) -> None:
        super().__init__()
        self._captured = captured
        self._graph = graph
        self._views: dict[fx.Node, fx.Node] = {}
        self._views_of: dict[StorageKey, list[fx.Node]] = defaultdict(list)

    def drop(self, root: fx.Node) -> None:
        """Forget the variable of a root, and those of its views."""
        del self[root]
        for key in storages(root):
            for view in self._views_of.pop(key, ()):
                self._views.pop(view, None)

    def resolve(self, node: fx.Node) -> fx.Node:
        """Return a variable with the value of a captured node, for an op that reads it."""
        return self.own(self._first_same(node))

    def _first_same(self, node: fx.Node) -> fx.Node:
        """Return `node`, or the first node of which it is the same view."""
        while node not in self and node not in self._views and (same := same_as(node)) is not None:
            node = same
        return node

    def own(self, node: fx.Node) -> fx.Node:
        """Return the variable of a captured node: that of its root, or a new view of it."""
        if node in self:
            return self[node]
        if node in self._views:
            return self._views[node]
        if node.op == "get_attr":
            self[node] = self._graph.node_copy(node)
            return self[node]
        # A view, or a plain value, is made again from its inputs.
        if not (self._captured.joint.is_view(node) or self._is_plain(node)):
            raise InvalidScheduleError(f"{node.name} is not on the device where the schedule reads it")
        of_shape = reshaped(node) is not None

        def source(before: fx.Node) -> fx.Node:
            before = self._first_same(before)
            # A shape of a shape is one call, unless the first is there.
            while of_shape and before not in self and before not in self._views and (n := reshaped(before)):
                before = self._first_same(n)
            return self.own(before)

        new = self._graph.node_copy(node, source)
        new.meta = dict(node.meta)
        self._views[node] = new
        for key in storages(node):
            self._views_of[key].append(node)
        return new

    def _is_plain(self, node: fx.Node) -> bool:
        """Return whether `node` can be repeated anywhere.

        It must make no tensor of the plan: it is a number, or a tensor that no op writes.
        """
        return node.op == "call_function" and not any(key in self._captured.tensor_of for key in storages(node))
