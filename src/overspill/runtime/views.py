"""Find redundant views: those that equal another view, with the same strides."""

from __future__ import annotations

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_COPIES = frozenset({aten.detach.default, aten.alias.default})
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})


def same_as(node: fx.Node) -> fx.Node | None:
    """Return the node before `node` of which it is a view with the same sizes and strides, or None."""
    if node.op != "call_function" or not node.args or not isinstance(before := node.args[0], fx.Node):
        return None
    if node.target in _COPIES:
        return before
    if node.target is aten.t.default and before.target is aten.t.default:
        (twice,) = before.args
        return twice if isinstance(twice, fx.Node) else None
    reshapes = node.target in _RESHAPES or node.target is aten.expand.default
    return before if reshapes and _sizes(node) is not None and _sizes(node) == _sizes(before) else None


def reshaped(node: fx.Node) -> fx.Node | None:
    """Return the node whose elements `node` has in another shape, or None."""
    if node.target is not aten.view.default or _sizes(node) is None:
        return None
    before = node.args[0]
    assert isinstance(before, fx.Node)
    return before


def _sizes(node: fx.Node) -> tuple[int, ...] | None:
    """Return the sizes of a tensor if none is 1, or None.

    Then its strides follow from its sizes and the places of its elements.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(type(n) is int and n > 1 for n in value.shape):
        return None
    return tuple(value.shape)
