"""Restore autograd's eager derivatives where tracing would use other formulas.

Autograd's formulas test whether a tensor is of a subclass, as all traced tensors are. They then avoid in-place updates
and reads of values. Most of these alternatives round the same; one does not. Away from the maximum, the gradient of
`max()` over all elements is zero for a plain tensor. For a traced one it is the mask times the gradient, which may be
minus zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def put_right(graph: fx.Graph) -> None:
    """Change `graph` in place so that it computes derivatives as for plain tensors."""
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if _spreads_evenly(node):
            node.target = aten.where.ScalarOther
            node.args = (*node.args, 0.0)


def _spreads_evenly(node: fx.Node) -> bool:
    """Return whether `node` divides a gradient evenly among equal elements, as after `max()` and `median()`."""
    if node.meta["val"].device.type != "cpu":  # elsewhere a plain tensor goes that way too
        return False
    # The pattern: mul(logical_or(eq, isnan and isnan), gradient / sum(mask)).
    mask, share = node.args
    either = _args(mask, aten.logical_or.default)
    divided = _args(share, aten.div.Tensor)
    if not either or not divided or _args(divided[1], aten.sum.default)[:1] != (mask,):
        return False
    equal, unknown = _args(either[0], aten.eq.Tensor), _args(either[1], aten.logical_and.default)
    return bool(equal) and tuple(_args(n, aten.isnan.default)[:1] for n in unknown) == tuple((n,) for n in equal)


def _args(node: Any, target: Any) -> tuple[Any, ...]:
    """Return the arguments of `node` if it calls `target`, otherwise none."""
    return node.args if isinstance(node, fx.Node) and node.target is target else ()
