"""Nested lists, tuples and dictionaries of values."""

from __future__ import annotations

import torch.utils._pytree
from torch.utils._pytree import TreeSpec as TreeSpec  # how a nested value is built

tree_flatten = torch.utils._pytree.tree_flatten
"""Its leaves, and its TreeSpec."""
tree_flatten_with_path = torch.utils._pytree.tree_flatten_with_path
"""The same, with the path of each leaf."""
tree_leaves = torch.utils._pytree.tree_leaves
"""Its leaves."""
tree_map = torch.utils._pytree.tree_map
"""The same value with each leaf mapped."""
tree_map_only = torch.utils._pytree.tree_map_only
"""The same, over leaves of one type."""
tree_unflatten = torch.utils._pytree.tree_unflatten
"""A nested value from its leaves."""
