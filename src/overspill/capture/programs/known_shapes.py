"""Give Inductor ops whose result shapes follow from values (`nonzero`) as ops of the shapes that were captured.

Inductor runs each op on fake tensors again, which have no values. So an op of Overspill takes its place: it does the
same, and has results of these shapes. Guards make sure that the values give these shapes
(`capture/compiled/known_values.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.masks import is_mask
from overspill.pytorch.dispatch import OpOverload, schema_of
from overspill.pytorch.schemas import node_argument
from overspill.pytorch.trees import tree_map_only

KNOWN_SHAPES = "overspill_known_shapes"
"""Namespace of the ops of known shapes."""
_made_up = ContextVar("overspill_values_made_up", default=False)
_LIBRARY = torch.library.Library(KNOWN_SHAPES, "DEF")


@contextmanager
def values_made_up() -> Iterator[None]:
    """Give these ops results of the captured shapes for any inputs, without values, inside the block."""
    token = _made_up.set(True)
    try:
        yield
    finally:
        _made_up.reset(token)


def with_known_shapes(graph: fx.Graph) -> None:
    """Replace the ops of `graph` whose result shapes follow from values."""
    for node in graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and _follows(node):
            node.target = _op_of(node.target, node.meta["val"])


def _follows(node: fx.Node) -> bool:
    """Return whether the shape really follows from values: that of an index does only if it has a mask."""
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and is_mask(index.meta["val"]) for index in node_argument(node, "indices"))


def _op_of(op: OpOverload, values: Any) -> OpOverload:
    """Return an op like `op` with results like `values`; its name identifies both, for Inductor's cache."""
    like = tree_map_only(Tensor, lambda t: (tuple(t.shape), t.stride(), t.dtype, t.device), values)
    name = f"{op.name().replace('::', '_').replace('.', '_')}_{hashlib.sha256(repr(like).encode()).hexdigest()[:16]}"

    def run(*args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs)
        if _made_up.get():
            del found
            return _blank(like)
        return found

    if not hasattr(getattr(torch.ops, KNOWN_SHAPES), name):
        _LIBRARY.define(name + str(schema_of(op))[str(schema_of(op)).index("(") :])
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{KNOWN_SHAPES}::{name}", lambda *_, **__: _blank(like), lib=_LIBRARY)
    found: OpOverload = getattr(getattr(torch.ops, KNOWN_SHAPES), name).default
    return found


def _blank(like: Any) -> Any:
    """Return uninitialized tensors of these shapes, strides, dtypes and devices: one, or a tuple of several."""
    if isinstance(like[0][0], tuple):
        return tuple(map(_blank, like))
    shape, strides, dtype, device = like
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
