"""Find the line of the user's Python that each traced node comes from.

Relies on the node metadata `stack_trace`, which AOTAutograd hands on from Dynamo's nodes to those of forward and of
their backward. Relies on tracers making nodes by `fx.Graph.create_node`, and on the names of functions that Dynamo
makes of the rest of a function after a break.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import fx

from overspill.capture.frames import FrameNumbers, Stack, stack_within

from .joint import BACKWARD_TAGS

LINES = "overspill_lines"
"""Key in a node's meta: the `Stack` that ran when it was made."""
_FRAME = re.compile(r'^ {0,2}File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
"""A frame as the traceback module writes it; quoted source lines are indented further."""
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


@contextmanager
def lines_noted() -> Iterator[None]:
    """Put the user's running lines on new FX nodes, inside the block.

    Useful where a tracer runs the user's Python itself.
    """
    create = fx.Graph.create_node

    def noting(graph: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(graph, *args, **kwargs)
        if stack := stack_within(sys._getframe(1)):
            node.meta[LINES] = stack
        return node

    with patch.object(fx.Graph, "create_node", noting):
        yield


class NodeLines(FrameNumbers):
    """Source lines of traced nodes; backward nodes without one get their forward node's."""

    def __init__(self) -> None:
        super().__init__()
        self._by_sequence: dict[int, int] = {}
        self._by_text: dict[str, int] = {}

    def forward(self, node: fx.Node) -> tuple[int, ...]:
        """Return the line number of a forward node as a tuple, empty if unknown."""
        number, sequence = self._own(node), node.meta.get("seq_nr")
        # An op that saves nothing repeats the number of the one before it; the first one owns it.
        if sequence is not None and number >= 0:
            self._by_sequence.setdefault(sequence, number)
        return () if number < 0 else (number,)

    def backward(self, node: fx.Node) -> tuple[int, ...]:
        """Return the line number of a backward node as a tuple, empty if unknown.

        `forward` has to be called for its forward node first.
        """
        number = self._own(node)
        if number < 0:
            number = self.backward_of(self._by_sequence.get(node.meta.get("seq_nr", -1), -1))
        elif LINES not in node.meta and node.meta.get("partitioner_tag") in BACKWARD_TAGS:
            number = self.backward_of(number)  # else the user's own Python is the backward
        return () if number < 0 else (number,)

    def by_name(
        self, forward: Iterable[fx.Node], backward: Iterable[fx.Node]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the lines of Inductor's forward and backward nodes, by the names in its comments.

        Forward nodes have the names of Dynamo's nodes, also where backward recomputes them.
        """
        in_forward: dict[str, tuple[int, ...]] = {}
        for node in forward:
            of = node.meta.get("from_node") or [node]
            in_forward.setdefault(of[0].name, self.forward(node))
        return in_forward, in_forward | {node.name: self.backward(node) for node in backward}

    def _own(self, node: fx.Node) -> int:
        if stack := node.meta.get(LINES):
            return self.of_stack(stack)
        text = node.meta.get("stack_trace") or ""
        if text not in self._by_text:
            self._by_text[text] = self.of_stack(_stack_of(text))
        return self._by_text[text]


def _stack_of(text: str) -> Stack:
    return tuple((file, int(line), _RESUMED.sub(r"\1", function)) for file, line, function in _FRAME.findall(text))
