"""TensorFlow's lists of tensors (`core/kernels/list_kernels.h`), while a graph is made flat.

A list is a buffer of references, so what holds memory are its elements. Loops are unrolled, so the elements of each
list are known, and no op remains but those that copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from overspill.core.errors import UnsupportedError

from .graph import Made, Output

Value = Output | None
Append = Callable[[str, Sequence[Output], Sequence[Made]], list[Output]]
"""Appends an op of a type that reads outputs and makes others; returns these."""


@dataclass(frozen=True)
class TensorList:
    """A list: the output that each element is, or None where none was set."""

    elements: tuple[Value, ...] = ()


class ListOps:
    """The ops on lists. `values` are those of outputs that are known before the graph runs."""

    def __init__(self, append: Append, made: Callable[[Output], Made], values: dict[Output, Any]) -> None:
        self._append, self._made, self._values = append, made, values

    def run(self, op: Any, read: Sequence[Output | TensorList]) -> list[Output | TensorList]:
        """Return the outputs of `op`. Raises UnsupportedError for an op that is not known here."""
        run = _OPS.get(op.type)
        if run is None:
            raise UnsupportedError(f"{op.name} is a {op.type} on a list, which is not known here")
        return run(self, op, read)

    def _number(self, op: Any, output: Output | TensorList) -> int:
        value = None if isinstance(output, TensorList) else self._values.get(output)
        if value is None:
            raise UnsupportedError(f"{op.name} has an index that the graph does not say")
        return int(value)

    def _empty(self, *_: Any) -> list[Output | TensorList]:
        return [TensorList()]

    def _reserve(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return [TensorList((None,) * self._number(op, read[1]))]

    def _from_tensor(self, _: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        """Copy each row into a buffer of its own (TensorListFromTensor::Compute)."""
        whole = self._made(read[0])
        rows = [Made(whole.dtype, whole.shape[1:])] * whole.shape[0]
        return [TensorList(tuple(self._append("TensorListFromTensor", read[:1], rows)))]

    def _set(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        elements, index = list(read[0].elements), self._number(op, read[1])
        elements += [None] * (index + 1 - len(elements))
        elements[index] = read[2]
        return [TensorList(tuple(elements))]

    def _get(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return [self._element(op, read[0].elements[self._number(op, read[1])])]

    def _element(self, op: Any, element: Value) -> Output:
        """Return an element; one that was not set is zeros."""
        if element is not None:
            return element
        tensor = op.outputs[-1]
        return self._append("ZerosLike", (), [Made(tensor.dtype.name, tuple(tensor.shape.as_list()))])[0]

    def _push(self, _: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return [TensorList((*read[0].elements, read[1]))]

    def _pop(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        *rest, last = read[0].elements
        return [TensorList(tuple(rest)), self._element(op, last)]

    def _stack(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        """Join the elements in a new buffer."""
        elements = [each for each in read[0].elements if each is not None]
        if not elements:
            return [self._element(op, None)]
        row = self._made(elements[0])
        return [*self._append(op.type, elements, [Made(row.dtype, (len(read[0].elements), *row.shape))])]

    def _concatenate(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        elements = [each for each in read[0].elements if each is not None]
        parts = [self._made(each) for each in elements]
        rows = sum(part.shape[0] for part in parts)
        made = [Made(parts[0].dtype, (rows, *parts[0].shape[1:])), Made("int64", (len(parts),))]
        return [*self._append(op.type, elements, made)]

    def _gather(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        indices = self._values.get(read[1])
        if indices is None:
            raise UnsupportedError(f"{op.name} has indices that the graph does not say")
        chosen = TensorList(tuple(read[0].elements[int(index)] for index in indices))
        return self._stack(op, [chosen])

    def _resize(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        size = self._number(op, read[1])
        return [TensorList((*read[0].elements[:size], *(None,) * (size - len(read[0].elements))))]

    def _length(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return [self._said(op, np.int32(len(read[0].elements)))]

    def _row_shape(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        shapes = [self._made(each).shape for each in read[0].elements if each is not None]
        return [self._said(op, np.array(shapes[0] if shapes else (), np.int32))]

    def _said(self, op: Any, value: Any) -> Output:
        """Return an output whose value is known."""
        (output,) = self._append(op.type, (), [Made("int32", value.shape)])
        self._values[output] = value
        return output

    def _same(self, _: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return list(read)

    def _zeros(self, _: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        return [TensorList((None,) * len(read[0].elements))]

    def _add(self, op: Any, read: Sequence[Any]) -> list[Output | TensorList]:
        """Add lists element by element; what only one has is taken as it is."""
        made: list[Value] = []
        for elements in zip(*(each.elements for each in read), strict=True):
            set_ones = [each for each in elements if each is not None]
            if len(set_ones) > 1:
                made += self._append(op.type, set_ones, [self._made(set_ones[0])])
            else:
                made.append(set_ones[0] if set_ones else None)
        return [TensorList(tuple(made))]


_OPS: dict[str, Callable[[ListOps, Any, Sequence[Any]], list[Output | TensorList]]] = {
    "EmptyTensorList": ListOps._empty, "TensorListReserve": ListOps._reserve,
    "TensorListFromTensor": ListOps._from_tensor, "TensorListSetItem": ListOps._set,
    "TensorListGetItem": ListOps._get, "TensorListPushBack": ListOps._push, "TensorListPopBack": ListOps._pop,
    "TensorListLength": ListOps._length, "TensorListElementShape": ListOps._row_shape,
    "TensorListStack": ListOps._stack, "TensorListConcatV2": ListOps._concatenate,
    "TensorListGather": ListOps._gather, "TensorListResize": ListOps._resize, "Identity": ListOps._same,
    "StopGradient": ListOps._same, "ZerosLike": ListOps._zeros, "AddN": ListOps._add,
}  # fmt: skip
MAKES_LISTS = frozenset({"EmptyTensorList", "TensorListReserve", "TensorListFromTensor"})
"""Ops that make a list without reading one."""
LARGEST_VALUE = 1 << 12
"""Numbers in the largest array whose values are followed while the graph is traced."""


def evaluated(tensorflow: Any, op: Any, read: Sequence[Any]) -> list[Any] | None:
    """Return the values of the outputs of `op` for known inputs; None if they are not followed.

    Integers and booleans of few elements are computed: counters, conditions, sizes and indices.
    """
    if op.type == "Const":
        value = op.get_attr("value")
        size = prod(each.size for each in value.tensor_shape.dim)
        return [tensorflow.make_ndarray(value)] if size <= LARGEST_VALUE else None
    kernel = getattr(tensorflow.raw_ops, op.type, None)
    whole = all(tensor.dtype.is_integer or tensor.dtype.is_bool for tensor in op.outputs)
    if kernel is None or not op.outputs or not whole or op.op_def.is_stateful or not read:
        return None
    arguments: dict[str, Any] = {}
    given, inferred = list(read), set[str]()
    # The kernel's first parameters are the op's inputs, some under another name.
    for name, argument in zip(inspect.signature(kernel).parameters, op.op_def.input_arg, strict=False):
        many = argument.number_attr or argument.type_list_attr
        count = op.get_attr(many) if argument.number_attr else len(op.get_attr(many)) if many else 1
        arguments[name] = given[:count] if many else given[0]
        del given[:count]
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
    arguments |= {attr.name: op.get_attr(attr.name) for attr in op.op_def.attr if attr.name not in inferred}
    made = kernel(**arguments)
    made = [made] if not isinstance(made, (list, tuple)) else list(made)
    return [each.numpy() for each in made] if sum(int(tensorflow.size(m)) for m in made) <= LARGEST_VALUE else None
