"""Find masks among the indices of an op.

The elements that masks select, and so the result's shape, follow from their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def is_mask(index: Tensor | None) -> bool:
    """Return whether an index selects by truth values."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def by_positions(
    indices: Iterable[Tensor | None], positions: Callable[[Tensor], Sequence[Tensor]]
) -> list[Tensor | None]:
    """Return the indices with each mask replaced by the `positions` that it selects, one tensor a dimension."""
    found: list[Tensor | None] = []
    for index in indices:
        found += positions(index) if index is not None and is_mask(index) else [index]
    return found
