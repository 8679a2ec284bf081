"""Avoids graph breaks at `requires_grad_()` on values that forward computes.

As peft does with the output of a frozen embedding. Dynamo ends a graph there where an output depends on that value, for
AOTAutograd forgets it. An output that depends on a parameter too requires gradients all the same, and the parameter's
gradient is the same.

Names private to PyTorch that this file relies on (2.13 and 2.14; where they are not there, graphs end as ever):
`OutputGraph._check_requires_grad_intermediate_outputs`, and of what Dynamo knows of a value `as_proxy` and `example_value`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable
from torch.utils._pytree import tree_leaves

CHECK = "_check_requires_grad_intermediate_outputs"
PLAIN: Callable[..., None] | None = getattr(OutputGraph, CHECK, None)


def follow_leaves(follows: bool) -> None:
    """Switch Dynamo's check for such values to ours, or back."""
    if PLAIN is not None:
        setattr(OutputGraph, CHECK, _check if follows else PLAIN)


def _check(graph: OutputGraph, outputs: Sequence[Any], tx: Any) -> None:
    """Dynamo's own check, limited to outputs that depend on no parameter."""
    assert PLAIN is not None
    trained: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _requires_gradient(node) and (node.op == "placeholder" or not trained.isdisjoint(node.all_input_nodes)):
            trained.add(node)
    left = [o for o in outputs if not (isinstance(o, TensorVariable) and o.as_proxy().node in trained)]
    PLAIN(graph, left, tx)


def _requires_gradient(node: fx.Node) -> bool:
    return any(
        isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(node.meta.get("example_value"))
    )
