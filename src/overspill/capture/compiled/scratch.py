"""Results that lie in more memory than they fill: their C++ kernels make them in a larger buffer, and keep it.

Tracing does not show that. A mean or sum would keep the bytes of all the losses that it is of as long as it lives, so it
is copied out of them when a captured step runs; the other results are counted as large as they are.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

aten = torch.ops.aten

LOSSES = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
})  # fmt: skip
"""Ops that reduce the loss of every element in the storage where these are (PyTorch 2.13, aten/src/ATen/native/Loss.cpp)."""
AS_LARGE_AS_INPUT = frozenset({aten.im2col.default, aten.col2im.default})
"""Ops that resize a tensor like their input to what they make (PyTorch 2.13, aten/src/ATen/native/Im2Col.cpp, Col2Im.cpp)."""


def reduces_in_place(node: fx.Node) -> bool:
    """Whether `node` is one of LOSSES, and reduced."""
    return node.target in LOSSES and node.meta["val"].dim() == 0


def scratch_bytes(node: fx.Node) -> int:
    """Bytes that `node` takes while it runs, besides its results: of reduced LOSSES, the loss of every element."""
    if not reduces_in_place(node):
        return 0
    shapes = (n.meta["val"].shape for n in node.all_input_nodes[:2])
    return prod(torch.broadcast_shapes(*shapes)) * node.meta["val"].element_size()
