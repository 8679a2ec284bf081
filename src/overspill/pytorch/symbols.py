"""Sizes in a trace that stand for any size from two on, with what the trace has decided by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .fake_tensors import FakeTensorMode

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


def new_size(mode: FakeTensorMode, name: str, now: int) -> Any:
    """Return a number of `mode` that stands for any size from two on, and decides as `now` does."""
    if mode.shape_env is None:
        mode.shape_env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        mode.static_shapes = True
    source = ConstantSource(name)
    symbol = mode.shape_env.create_symbol(now, source, dynamic_dim=DimDynamic.DYNAMIC)
    return mode.shape_env.create_symintnode(symbol, hint=now, source=source)


def decisions(mode: FakeTensorMode) -> list[Any]:
    """Return the conditions on sizes that the trace has relied on."""
    return [] if mode.shape_env is None else [guard.expr for guard in mode.shape_env.guards]


def expression(value: Any) -> Any:
    """Return the expression that a symbolic number is."""
    return value.node.expr


def value_of(expr: Any, sizes: Mapping[Any, int]) -> Any:
    """Return the value of an expression where its symbols have these sizes."""
    return expr.xreplace(sizes)


def is_symbolic(value: Any) -> bool:
    """Return whether a value is a symbolic number, or a tensor with a symbolic size or stride."""
    if isinstance(value, Tensor):
        return any(isinstance(n, Symbolic) for n in (*value.shape, *value.stride()))
    return isinstance(value, Symbolic)
