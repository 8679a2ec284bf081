"""Find ops that can write their result into given memory.

For most ops that is the overload with `out=`, if the kernel itself is registered for it. It computes the same, and
takes no further memory of the result's size. An overload that PyTorch generates does not count, because it copies the
op's own result. Ops that copy or fill a tensor do so with any given tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from overspill.core import Graph, Op
from overspill.pytorch.dispatch import OpOverload, has_kernel, schema_of
from overspill.pytorch.schemas import node_argument

from .joint import is_random
from .kernels import RUN_AS
from .scratch import reduces_in_place

aten = torch.ops.aten


class ResultMemory(NamedTuple):
    """The call that makes a node's result in given memory: `target(*args, **kwargs)`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    """The argument that is the memory; the first one if this is empty."""


def into_memory(node: fx.Node) -> ResultMemory | None:
    """Return the call by which `node` makes its result in given memory, or None if it cannot."""
    value, op = node.meta.get("val"), node.target
    if not isinstance(value, Tensor) or not isinstance(op, OpOverload) or not _fills_its_memory(value):
        return None
    if op in RUN_AS or is_random(node) or reduces_in_place(node):
        return None
    # What another op does just so; else the same kernel with `out=`.
    if op in COPIES:
        alike = node.args[0].meta["val"].device == value.device
        return ResultMemory(Tensor.copy_, (node.args[0],), {}) if alike else None
    if op in FILLED or op in FULL:
        return ResultMemory(Tensor.fill_, (FILLED[op] if op in FILLED else node_argument(node, "fill_value"),), {})
    if op in BY_HAND and (op is aten.empty.memory_format or not node.kwargs):
        return ResultMemory(BY_HAND[op], node.args, {})
    return _with_out(node, "CUDA" if value.is_cuda and torch.backends.cuda.is_built() else "CPU")


def _with_out(node: fx.Node, backend: str) -> ResultMemory | None:
    op, args = node.target, node.args
    if op is aten.relu.default:
        op, args = aten.clamp_min.default, (*args, 0)
    if op in OF_NUMBERS and len(args) == 2:
        op = OF_NUMBERS[op]
    if (out := out_overload(op, backend)) is None:
        return None
    target, name = out
    takes = {argument.name for argument in schema_of(target).arguments}
    return ResultMemory(target, args, {key: value for key, value in node.kwargs.items() if key in takes}, name)


def _as_it_is(into: Tensor, *_: Any) -> Tensor:
    return into


def _slice_backward(into: Tensor, gradient: Tensor, _: Any, dim: int, start: int, end: int, step: int) -> Tensor:
    into.zero_()
    aten.slice.Tensor(into, dim, start, end, step).copy_(gradient)
    return into


def _select_backward(into: Tensor, gradient: Tensor, _: Any, dim: int, index: int) -> Tensor:
    into.zero_()
    into.select(dim, index).copy_(gradient)
    return into


def _masked_fill(into: Tensor, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return into.copy_(x).masked_fill_(mask, value)


def _embedding(into: Tensor, weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    torch.index_select(weight, 0, indices.reshape(-1), out=into.view(-1, weight.shape[1]))
    return into


PIECE_BYTES = 32 << 20
"""The most bytes of an embedding's gradient that are computed at a time."""


def scratch_in_pieces(graph: Graph, op: Op, tensor: int) -> int:
    """Return the further bytes that `op` takes to make `tensor` in given memory piece by piece."""
    nbytes = graph.tensors[tensor].nbytes
    if op.name != "embedding_dense_backward" or not nbytes:
        return 0
    read = sum(graph.tensors[t].nbytes for t in op.reads)
    return min(nbytes, PIECE_BYTES) * (nbytes + read) // nbytes


def _embedding_backward(into: Tensor, gradient: Tensor, *how: Any) -> Tensor:
    """Compute the gradient of an embedding, some columns at a time: each column is summed by itself."""
    width, columns = into.shape[-1], max(1, PIECE_BYTES // (into.shape[0] * into.itemsize))
    for start in range(0, width, columns):
        some = slice(start, start + columns)
        into[:, some] = aten.embedding_dense_backward.default(gradient[..., some], *how)
    return into


BY_HAND: dict[Any, Callable[..., Tensor]] = {
    aten.empty.memory_format: _as_it_is,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""The same computation for ops without an own `out=` kernel.

PyTorch 2.13, aten/src/ATen/native: TensorShape.cpp, TensorAdvancedIndexing.cpp, Embedding.cpp.
"""
OF_NUMBERS = {
    aten.mul.Scalar: aten.mul.Tensor, aten.div.Scalar: aten.div.Tensor, aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}  # fmt: skip
"""Ops that call another one with their number as a tensor (BinaryOps.cpp). `relu` is `clamp_min` of 0
(Activation.cpp)."""
COPIES = frozenset({aten.clone.default, aten._to_copy.default})
FULL = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})
"""Ops that fill their result with an argument."""
FILLED = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
"""Ops whose result has one number everywhere."""


def _fills_its_memory(value: Tensor) -> bool:
    """Return whether a result covers all of its storage, each byte once."""
    return (
        value.layout is torch.strided
        and 0 < value.numel() * value.element_size() == value.untyped_storage().nbytes()
        and value.storage_offset() == 0
        and not value.is_conj()
        and not value.is_neg()
    )


@cache
def out_overload(op: OpOverload, backend: str) -> tuple[Any, str] | None:
    """Return the overload of `op` whose `backend` kernel writes into `out=`, with that argument's name.

    Returns None if it has no such kernel.
    """
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments]
    if len(schema_of(op).returns) != 1 or any(a.alias_info is not None for a in schema_of(op).arguments):
        return None
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        given, *more = [a.name for a in schema_of(other).arguments if a.is_out] or [""]
        takes = [(a.name, str(a.type)) for a in schema_of(other).arguments if not a.is_out]
        # Factory arguments follow from the result.
        if given and not more and takes == [a for a in wanted if a in takes or a[0] not in _OF_RESULT]:
            found = has_kernel(other.name(), backend)
            return (other, given) if found else None
    return None


_OF_RESULT = frozenset({"dtype", "layout", "device", "pin_memory"})
