"""Nested lists, tuples and dictionaries of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree
from torch.fx.immutable_collections import immutable_list
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import TreeSpec as TreeSpec  # how a nested value is built

tree_flatten = torch.utils._pytree.tree_flatten
"""Its leaves, and its TreeSpec."""
tree_flatten_with_path = torch.utils._pytree.tree_flatten_with_path
"""The same, with the path of each leaf."""
tree_map = torch.utils._pytree.tree_map
"""The same value with each leaf mapped."""
tree_map_only = torch.utils._pytree.tree_map_only
"""The same, over leaves of one type."""
tree_unflatten = torch.utils._pytree.tree_unflatten
"""A nested value from its leaves."""


def tree_leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a nested value, as PyTorch's function does but sooner: captures ask at every op."""
    if is_leaf is not None:
        return torch.utils._pytree.tree_leaves(value, is_leaf)
    leaves: list[Any] = []
    _collect(value, leaves)
    return leaves


def _collect(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    if kind is tuple or kind is list or kind is immutable_list:
        for one in value:
            _collect(one, leaves)
    elif kind is dict:
        for one in value.values():
            _collect(one, leaves)
    elif kind in SUPPORTED_NODES or issubclass(kind, tuple):  # a named tuple need not be registered
        leaves += torch.utils._pytree.tree_leaves(value)
    else:
        leaves.append(value)
