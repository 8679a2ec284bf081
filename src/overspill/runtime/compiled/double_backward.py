"""Refuse a second derivative through a compiled graph, which has none."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from overspill.core.errors import UnsupportedError
from overspill.pytorch.trees import tree_leaves

COMPILED = "CompiledFunctionBackward"
"""The name of a compiled graph's autograd node."""
DEPTH = 4
"""Most views that autograd may put on a compiled graph's output."""


def refuse_double_backward(node: Node) -> None:
    """Make this node's gradients raise UnsupportedError when differentiated."""
    this = weakref.ref(node)

    def before(_given: Any) -> None:
        # Only where that is asked for: for a hook of this kind autograd keeps what the node is given until it has run.
        if torch.is_grad_enabled() and (here := this()) is not None:
            here.register_hook(_mark)

    node.register_prehook(before)


def compiled_node(outputs: Any) -> Node | None:
    """Return the autograd node of the compiled graph behind `outputs`, or None if it has no backward."""
    return next(filter(None, map(_node_behind, tree_leaves(outputs))), None)


def _node_behind(output: Any) -> Node | None:
    """Return the autograd node of the compiled graph that made `output` or its base, or None."""
    found = [output.grad_fn] if isinstance(output, Tensor) and output.grad_fn is not None else []
    for _ in range(DEPTH):
        for node in found:
            if node.name() == COMPILED:
                return node
        found = [behind for node in found for behind, _ in node.next_functions if behind is not None]
    return None


def _mark(gradients: tuple[Tensor | None, ...], _: Any) -> None:
    """Make the autograd node of the gradients raise an error; it exists only with create_graph=True."""
    for gradient in gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(_refuse)
            return


def _refuse(_: Any) -> None:
    raise UnsupportedError(
        "the gradients of a compiled model cannot be differentiated again (create_graph=True, a gradient penalty): "
        "compile the function that computes the loss with these gradients in it (overspill.compile(loss_fn)), or use "
        "overspill.train_step; without a plan, the plain model has the same parameters (compiled._orig_mod)"
    )
