"""Ops that can write their result into memory that they are given.

Of most ops that is the overload with `out=`, where the kernel itself is registered for it: it computes the same, and
takes no memory of the result's size besides. An overload that PyTorch generates, which copies what the op has returned,
is not. What copies or fills a tensor does so with any other.

Names private to PyTorch that this file relies on (2.11 to 2.14): `torch._C._dispatch_has_kernel_for_dispatch_key`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .joint import is_random
from .kernels import RUN_AS
from .scratch import reduces_in_place

aten = torch.ops.aten


class Given(NamedTuple):
    """The call that makes a node's result in given memory: `target(*args, **kwargs)`.

    The memory is the argument `name`, or the first one if that is empty.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""


def into_given(node: fx.Node) -> Given | None:
    """How `node` makes its result in memory that it is given; None if it cannot."""
    value, op = node.meta.get("val"), node.target
    if not isinstance(value, Tensor) or not isinstance(op, torch._ops.OpOverload) or not _fills_its_memory(value):
        return None
    if op in RUN_AS or is_random(node) or reduces_in_place(node):
        return None
    # A copy, or a number everywhere; else the same kernel with `out=`.
    if op in COPIES and node.args[0].meta["val"].device == value.device:
        found: Given | None = Given(Tensor.copy_, (node.args[0],), {})
    elif op in FILLED or op in FULL:
        found = Given(Tensor.fill_, (FILLED[op] if op in FILLED else node.args[1],), {})
    elif op is aten.relu.default:  # which calls it (PyTorch 2.13, aten/src/ATen/native/Activation.cpp)
        found = Given(aten.clamp_min.out, (node.args[0], 0), {}, "out")
    else:
        found = _with_out(node, "CUDA" if value.is_cuda and torch.backends.cuda.is_built() else "CPU")
    return found


def _with_out(node: fx.Node, backend: str) -> Given | None:
    if (out := out_overload(node.target, backend)) is None:
        return None
    target, name = out
    takes = {argument.name for argument in target._schema.arguments}
    return Given(target, node.args, {key: value for key, value in node.kwargs.items() if key in takes}, name)


COPIES = frozenset({aten.clone.default, aten._to_copy.default})
FULL = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})
FILLED = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
"""Ops whose result has one number everywhere."""


def _fills_its_memory(value: Tensor) -> bool:
    """Whether a result is all of its storage, each byte once."""
    return (
        value.layout is torch.strided
        and 0 < value.numel() * value.element_size() == value.untyped_storage().nbytes()
        and value.storage_offset() == 0
        and not value.is_conj()
        and not value.is_neg()
    )


@cache
def out_overload(op: torch._ops.OpOverload, backend: str) -> tuple[Any, str] | None:
    """The overload of `op` whose kernel for `backend` writes into `out=`, and the argument's name."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    if len(op._schema.returns) != 1 or any(a.alias_info is not None for a in op._schema.arguments):
        return None
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        given, *more = [a.name for a in other._schema.arguments if a.is_out] or [""]
        takes = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        # Factory arguments follow from the result.
        if given and not more and takes == [a for a in wanted if a in takes or a[0] not in _OF_RESULT]:
            found = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), backend)
            return (other, given) if found else None
    return None


_OF_RESULT = frozenset({"dtype", "layout", "device", "pin_memory"})
