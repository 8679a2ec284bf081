"""What autograd hands to a compiled graph's backward: nothing for outputs that no loss follows from.

AOTAutograd makes zeros of nothing, and gives zeros on where eager gives nothing: an optimizer then makes state for parameters that it
leaves alone in eager, and weight decay changes them. So gradients that follow from nothing are nothing here too.

Names private to PyTorch that this file relies on (2.11 to 2.13): `desc` of tangents, and its `output`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import fx

from overspill.capture.compiled.joint import JointGraph


class _Absent(threading.local):
    """Outputs of the graph whose backward is about to run, in this thread, that have no gradient."""

    outputs: frozenset[int] = frozenset()


_ABSENT = _Absent()


class Gradients:
    """Of each gradient that a joint graph's backward gives, the outputs of forward whose gradients it follows from."""

    def __init__(self, joint: JointGraph) -> None:
        number = {repr(desc): i for i, desc in enumerate(joint.forward_descs)}
        follows: dict[fx.Node, frozenset[int]] = {
            tangent: frozenset({number[repr(tangent.meta["desc"].output)]}) for tangent in joint.tangents
        }
        for node in joint.module.graph.nodes:
            follows.setdefault(node, frozenset().union(*(follows[n] for n in node.all_input_nodes)))
        self.follow = [follows.get(output, frozenset()) for output in joint.backward_outputs]

    @staticmethod
    def begin(given: Sequence[Any]) -> None:
        """Backward is about to run, and is `given` these, one for each output."""
        _ABSENT.outputs = frozenset(i for i, gradient in enumerate(given) if gradient is None)

    def of(self, made: Sequence[Any]) -> list[Any]:
        """What backward has `made`, without the gradients that are zeros only because nothing was given."""
        absent = _ABSENT.outputs
        return [None if why and why <= absent else one for one, why in zip(made, self.follow, strict=True)]
