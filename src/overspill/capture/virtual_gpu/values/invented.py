"""Give placeholder values to a script that reads values, and record the lines that read them.

A fraction is 0.5, a whole number 1, a truth value false, in tensors and on their own. A comparison of a tensor with a
number follows from that, and a tensor equals no other tensor. A condition that is asserted, or that guards a `raise`,
has the answer with which the script goes on. A shape that depends on values (`nonzero`, masks, `unique`) is the largest
possible.
"""

from __future__ import annotations

import ast
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from overspill.capture.masks import by_positions, is_mask
from overspill.pytorch.dispatch import DisableTorchDispatch, schema_of
from overspill.pytorch.fake_tensors import DynamicOutputShapeException, FakeTensor
from overspill.pytorch.schemas import argument, arguments
from overspill.pytorch.trees import tree_map

from . import real_values
from .assumptions import known
from .frames import noted_frame, user_frame

aten = torch.ops.aten
FRACTION, WHOLE, TRUTH = 0.5, 1, False
"""Placeholder values of fractions, whole numbers and booleans."""

Place = tuple[str, int]
Observe = Callable[..., Any]


class Invented:
    """Lines, as (file, number), that read an invented value: one of this module's placeholder values.

    `sizes` are lines that count or index by one. `shapes` are lines that run an op whose shape depends on values, with
    the op.
    """

    def __init__(self) -> None:
        self.lines: dict[Place, None] = {}
        self.sizes: dict[Place, None] = {}
        self.shapes: dict[tuple[Place, str], None] = {}

    @property
    def places(self) -> list[Place]:
        """All of these lines, those that may decide sizes first."""
        return list(self.sizes | {place: None for place, _ in self.shapes} | self.lines)

    def read(self, frame: FrameType | None) -> None:
        """Record that `frame` reads a value."""
        if (found := noted_frame(frame)) is not None:
            self.lines[_place(found)] = None

    def sized(self, frame: FrameType | None) -> None:
        """Record that `frame` uses a whole number as a size or position."""
        if (found := noted_frame(frame)) is not None:
            self.sizes[_place(found)] = None

    def shaped(self, frame: FrameType | None, op: str) -> None:
        """Record that `frame` runs `op`, whose shape depends on values."""
        if (found := noted_frame(frame)) is not None:
            self.shapes[_place(found), op] = None

    def decide(self, frame: FrameType | None, answer: Any) -> Any:
        """Return `answer` to a read of `frame`, or the answer with which no error follows."""
        self.read(frame)
        needed = with_which_no_error_follows(frame)
        return answer if needed is None else needed

    def array(self, tensor: Tensor, frame: FrameType | None) -> Tensor:
        """Return a host tensor like `tensor` with placeholder values, read by `frame`."""
        self.read(frame)
        return placeholders(tensor)


def placeholders(tensor: Tensor) -> Tensor:
    """Return a host tensor like `tensor` with placeholder values."""
    with DisableTorchDispatch():
        return torch.full(tuple(tensor.shape), value_of(tensor), dtype=tensor.dtype, device="cpu")


def value_of(tensor: Tensor) -> Any:
    """Return the value of all elements of `tensor`."""
    if tensor.dtype is torch.bool:
        answer = known(tensor)
        return getattr(tensor, _GUESS, TRUTH) if answer is None else answer
    return FRACTION if tensor.dtype.is_floating_point or tensor.dtype.is_complex else WHOLE


def _place(frame: FrameType) -> Place:
    return frame.f_code.co_filename, frame.f_lineno


# --- Conditions that errors follow ------------------------------------------------------------------------------------


def with_which_no_error_follows(frame: FrameType | None) -> bool | None:
    """Return the answer to a read of `frame` that an `assert` or `if … raise` goes on with; None elsewhere."""
    found = user_frame(frame)
    return None if found is None else _needed(found.f_code.co_filename).get(found.f_lineno)


@cache
def _needed(file: str) -> dict[int, bool]:
    """Return the answers with which `assert` and `if … raise` go on, by line of `file`."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found |= _conditions(node.test, wanted=True)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            found |= _conditions(node.test, wanted=False)
    return found


def _conditions(test: ast.expr, *, wanted: bool) -> Iterator[tuple[int, bool]]:
    """Yield lines of the parts of `test`, with the answer of each that makes the whole `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand, wanted=not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _conditions(part, wanted=wanted)
    else:
        yield from ((line, wanted) for line in range(test.lineno, (test.end_lineno or test.lineno) + 1))


# --- Ops --------------------------------------------------------------------------------------------------------------


def answering(observe: Observe, fake_mode: Callable[[], Any], invented: Invented | None) -> Observe:
    """Wrap `observe` to answer ops whose result or shape depends on values: known ones, or `invented`."""

    def watched(func: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        if real_values.touches_unknown(func, args, kwargs) and not schema_of(func).is_mutable:
            args, kwargs = tree_map(lambda one: real_values.without_values(one, fake_mode()), (args, kwargs))
        # A value: known, or invented.
        if func in _READS and any(isinstance(value, FakeTensor) for value in args):
            return _answered(observe, invented, func, args, kwargs, compute)
        # A shape that depends on values: known, or the largest.
        if func is aten._pack_padded_sequence.default:
            given = arguments(func, args, kwargs)
            lengths = real_values.values_of(given["lengths"])
            args = args if lengths is None else tuple((given | {"lengths": lengths}).values())
        if (composition := _by_positions(func, args)) is not None:
            return _composed(fake_mode(), composition)
        if _has_shape_of_values(func) and args and isinstance(args[0], FakeTensor):
            return _shaped(observe, invented, func, args, kwargs, compute)
        # Any other op: values that follow, or a guess at truth values and bounds.
        result = observe(func, args, kwargs, compute)
        if not real_values.follow(func, args, kwargs, result) and invented is not None:
            _guess(func, args, result)
            _bound(func, args, kwargs, result)
        return result

    return watched


def _answered(observe: Observe, invented: Invented | None, func: Any, args: Any, kwargs: Any, compute: Any) -> Any:
    """Return the value that `func` reads."""
    if (known := real_values.computed(func, args, kwargs)) is not None:
        return known
    return observe(func, args, kwargs, compute) if invented is None else _READS[func](invented, args, sys._getframe(2))


def _shaped(observe: Observe, invented: Invented | None, func: Any, args: Any, kwargs: Any, compute: Any) -> Any:
    """Return the result of `func`, whose shape depends on values."""
    values = real_values.computed(func, args, kwargs)
    if values is not None:
        result = observe(func, args, kwargs, lambda *_: _like(args[0], values))
        real_values.keep(result, values)
        return result
    if invented is None or (largest := _LARGEST.get(func)) is None:
        return observe(func, args, kwargs, compute)
    invented.shaped(sys._getframe(2), schema_of(func).name.partition("::")[2].lstrip("_"))
    return observe(func, args, kwargs, lambda a, k: largest(*a, **k))


@cache
def _has_shape_of_values(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor


def _like(first: Tensor, values: Any) -> Any:
    """Return fake tensors on the device of `first`, with the shapes of `values`."""
    if isinstance(values, Tensor):
        return first.new_empty(values.shape, dtype=values.dtype)
    return tuple(_like(first, value) for value in values)


def _composed(mode: Any, composition: Callable[[], Any]) -> Any:
    """Run `composition` with each of its ops recorded as one of the program."""
    before, mode.computing = mode.computing, False
    try:
        with mode:
            return composition()
    finally:
        mode.computing = before


def _by_positions(func: Any, args: Any) -> Callable[[], Any] | None:
    """Return masked selection by positions, as CUDA does it, or None for other ops.

    aten/src/ATen/native/TensorAdvancedIndexingUtils.h, `expandTensors`.
    """
    if func.namespace == "torchvision" and schema_of(func).name == "torchvision::nms":
        return lambda: _suppressed(*args[:2])
    if func is aten.masked_select.default:
        if not any(isinstance(tensor, FakeTensor) for tensor in args):
            return None
        return lambda: aten.index.Tensor(*_expanded(*args))
    if func is not aten.index.Tensor or not any(map(is_mask, args[1])):
        return None

    return lambda: aten.index.Tensor(args[0], by_positions(args[1], lambda mask: mask.nonzero().unbind(1)))


def _expanded(x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape), [mask.expand(shape)]


def _suppressed(boxes: Tensor, scores: Tensor) -> Tensor:
    """Return the boxes that no box of a better score overlaps.

    torchvision/csrc/ops/cuda/nms_kernel.cu, `nms_kernel`.
    """
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    ordered = boxes.index_select(0, order)
    words = -(-len(boxes) // 64)
    masks = boxes.new_empty(len(boxes) * words, dtype=torch.int64)
    kept = boxes.new_zeros(len(boxes), dtype=torch.bool)
    del ordered, masks
    return order.masked_select(kept)


def _unique(x: Tensor, _sorted: bool = True, inverse: bool = False, counts: bool = False) -> tuple[Tensor, ...]:
    most = min(x.numel(), getattr(x, _BELOW, x.numel()))
    return x.new_empty(most), _whole(x, x.shape if inverse else 0), _whole(x, most if counts else 0)


def _unique_rows(
    x: Tensor, dim: int, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, ...]:
    rows = x.shape[dim]
    return x.new_empty(x.shape), _whole(x, rows if inverse else 0), _whole(x, rows if counts else 0)


def _unique_in_a_row(
    x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Tensor, ...]:
    return _unique(x, True, inverse, counts) if dim is None else _unique_rows(x, dim, True, inverse, counts)


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return the counts of `bincount`, of shape [minlength].

    Raises DynamicOutputShapeException without `minlength`.
    """
    if not minlength:
        raise DynamicOutputShapeException(aten.bincount.default)
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _whole(x: Tensor, shape: Any) -> Tensor:
    return x.new_empty(shape, dtype=torch.int64)


def _scalar(invented: Invented, args: Any, frame: FrameType) -> Any:
    invented.read(frame)
    return value_of(args[0])


_READS: dict[Any, Callable[[Invented, Any, FrameType], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: lambda invented, _, frame: invented.decide(frame, TRUTH),
    # A test whether tensors are close is a test of something that is right.
    aten.allclose.default: lambda invented, _, frame: invented.decide(frame, True),
}
_LARGEST: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: lambda x: _whole(x, (x.numel(), x.dim())),
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique_rows,
    aten.unique_consecutive.default: _unique_in_a_row,
    aten.bincount.default: _counts,
}

_BELOW = "_overspill_below"  # on a fake tensor of positions: how many there are
_POSITIONS = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default}
"""Ops whose last result is positions along a dimension."""


def _bound(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note on `result`, if it has positions along a dimension, the size of that dimension."""
    first = args[0] if args and isinstance(args[0], FakeTensor) else None
    if first is None:
        return
    if func in _POSITIONS:
        dim = argument(func, args, kwargs, "dim")
        positions = result[1] if isinstance(result, (list, tuple)) else result
        setattr(positions, _BELOW, first.numel() if dim is None or not first.dim() else first.shape[dim])
    elif hasattr(first, _BELOW) and isinstance(result, FakeTensor) and (func.is_view or func in _HANDED_ON):
        setattr(result, _BELOW, getattr(first, _BELOW))


# --- Truth values -----------------------------------------------------------------------------------------------------

_GUESS = "_overspill_guess"  # on a fake tensor: the truth value that was invented for all of its elements
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_HANDED_ON = {
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
    aten._is_any_true.default, aten._is_all_true.default, aten.view.default, aten._unsafe_view.default,
    aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default, aten.squeeze.default,
    aten.unsqueeze.default, aten.select.int,
}  # fmt: skip
_JOINED: dict[Any, Callable[..., bool]] = {
    aten.logical_not.default: lambda one: not one,
    aten.bitwise_not.default: lambda one: not one,
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor), lambda one, other: one and other),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), lambda one, other: one or other),
}


def _guess(func: Any, args: Any, result: Any) -> None:
    """Note on `result`, if it has truth values, their value by the rule."""
    if not isinstance(result, FakeTensor) or result.dtype is not torch.bool:
        return
    answer: bool | None = None
    if (name := schema_of(func).name.partition("::")[2]) in _COMPARISONS:
        compared = isinstance(args[0], Tensor) and isinstance(args[1], (int, float))
        answer = _COMPARISONS[name](value_of(args[0]), args[1]) if compared else name == "ne"
    elif func in _HANDED_ON and args[0].dtype is torch.bool:
        answer = value_of(args[0])
    elif func in _JOINED and all(isinstance(tensor, Tensor) and tensor.dtype is torch.bool for tensor in args):
        answer = _JOINED[func](*(value_of(tensor) for tensor in args))
    if answer is not None:
        setattr(result, _GUESS, bool(answer))
