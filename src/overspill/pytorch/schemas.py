"""The arguments of an op's call by its schema: all by name, and those that it writes.

`args` and `kwargs` are those of the call, in a dispatch or in an FX node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

Arguments = Mapping[str, Any]
"""The arguments of a call by their names in the schema."""


@cache
def _parameters(op: Any) -> dict[str, tuple[int, Any]]:
    """Position and default of each argument of `op`, by its name."""
    return {a.name: (position, a.default_value) for position, a in enumerate(op._schema.arguments)}


@cache
def _written(op: Any) -> tuple[str, ...]:
    """Return the names of the arguments that `op` writes in place."""
    return tuple(a.name for a in op._schema.arguments if a.is_write)


def position_of(op: Any, name: str) -> int | None:
    """Return the position of an argument of `op`; None if it has none of this name."""
    return _parameters(op).get(name, (None, None))[0]


def argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """One argument of a call of `op`, or its default."""
    position, default = _parameters(op)[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


def node_argument(node: fx.Node, name: str) -> Any:
    """One argument of a node that calls an op, or its default."""
    return argument(node.target, node.args, node.kwargs, name)


def arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of `op` by their names, defaults included."""
    return {name: argument(op, args, kwargs, name) for name in _parameters(op)}


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call of `op` writes in place; none of a callable without a schema.

    A fused optimizer writes gradients only to unscale them.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return []
    unscales = "grad_scale" not in _parameters(op) or argument(op, args, kwargs, "grad_scale") is not None
    return [argument(op, args, kwargs, name) for name in _written(op) if name != "grads" or unscales]
