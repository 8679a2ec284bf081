"""Recompute training batch norm from its batch alone, so that running statistics are not updated twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from overspill.pytorch.schemas import node_argument

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
CUDNN_BATCH_NORM = torch.ops.aten._batch_norm_with_update_functional.default
"""The op as which cuDNN's batch norm is captured (`kernels.py`)."""


def recomputes_without_statistics(node: fx.Node) -> bool:
    """Return whether `node` is a training batch norm, whose outputs do not depend on running statistics."""
    if node.target is CUDNN_BATCH_NORM:
        return bool(node_argument(node, "input").meta["val"].device.type == "cuda")
    return node.target is BATCH_NORM and node_argument(node, "training") is True


def results_without_statistics(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the batch norm's fake results without the last two, the new running statistics."""
    return tuple(node.meta["val"][:-2])


def call_without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op, with its arguments, that computes those results with the same kernel."""
    x, weight, bias, _, _, *rest = node.args
    if node.target is CUDNN_BATCH_NORM:
        return torch.ops.aten.cudnn_batch_norm.default, (x, weight, bias, None, None, True, *rest)
    return torch.ops.aten._native_batch_norm_legit.no_stats, (x, weight, bias, *rest)
