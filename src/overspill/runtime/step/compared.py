"""Read and compare Python values before each step.

Identity is compared first: it costs least and nearly always holds.
"""

from __future__ import annotations

import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

MISSING = object()
"""Stands for a missing attribute."""


class Compared(NamedTuple):
    """Values read at the capture, to compare with the present ones."""

    read: Callable[[Any], Sequence[Any]]
    """Returns the values found at `where`."""
    where: Any
    values: tuple[Any, ...]
    """The values at the capture."""
    names: Callable[[], Sequence[str]]
    """Returns a name for each value, for messages."""

    def changed(self) -> str:
        """Return the name of a value that differs now, or an empty string if none does."""
        try:
            now = self.read(self.where)
        except KeyError as gone:
            return next(n for n in self.names() if n.endswith(f".{gone.args[0]}"))
        if len(now) == len(self.values) and (all(map(is_, now, self.values)) or all(map(same, now, self.values))):
            return ""
        names = self.names()
        differ = [n for n, v, w in zip(names, self.values, now, strict=False) if not same(v, w)]
        return (differ or [*names, "what it reads"])[0]


def compared(table: Mapping[str, Any], names: tuple[str, ...], values: tuple[Any, ...], owner: str) -> Compared:
    """Return a comparison of the attributes `names` of `owner`, found in `table`, with `values`."""
    read = itemgetter(*names) if len(names) > 1 else (lambda where: (where[names[0]],))
    return Compared(read, table, values, lambda: [f"{owner}.{name}" for name in names])


def present(absent: frozenset[str], where: dict[str, Any]) -> tuple[Any, ...]:
    """Return the number of `absent` names that exist now, followed by these names."""
    return (0,) if absent.isdisjoint(where) else (len(now := sorted(absent & where.keys())), *now)


def items(value: Any) -> tuple[Any, ...]:
    """Return the number of items in a container, followed by its contents.

    The number comes first because a comparison ends with the shorter of two sequences.
    """
    return (len(value), *value, *value.values()) if isinstance(value, Mapping) else (len(value), *value)


def entries(values: tuple[Any, ...]) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a mapping from the result of `items`."""
    held = values[1:]
    return zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True)


def put_back(where: Any, values: tuple[Any, ...]) -> None:
    """Restore a container to the contents that `items` returned."""
    if not hasattr(where, "clear"):
        return
    held = values[1:]
    where.clear()
    if isinstance(where, Mapping):
        where.update(entries(values))  # type: ignore[attr-defined]
    elif isinstance(where, set):
        where.update(held)
    else:
        where.extend(held)


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return the content of a cell of a closure."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # not set yet
        return (MISSING,)


def value_of(variable: ContextVar[Any]) -> tuple[Any, ...]:
    """Return the value of a context variable."""
    return (variable.get(MISSING),)


def tensor_kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return the metadata of a tensor; its values are not compared, because the graph reads them at each step.

    The strides of a parameter are left out: while its bytes are in the store they are those of a placeholder. Its own
    step checks them.
    """
    known = isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided
    strides = tensor.layout if known else tensor.stride()
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def array_kind(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return shape, dtype and checksum of an array, whose values are constants of the graph."""
    return array.shape, str(array.dtype), zlib.crc32(array.tobytes())


DESCRIBE = tensor_kind, array_kind
"""They read no values, but make descriptions of them."""


def parts(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the containers within two equal values, each with its counterpart."""
    if isinstance(one, (tuple, list, frozenset)):
        yield one, other
        for inner in () if isinstance(one, frozenset) else zip(one, other, strict=True):
            yield from parts(*inner)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are one object, equal plain values, or tuples or lists of such.

    Both must have the same type. 0.0 differs from -0.0, and NaN equals NaN.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if isinstance(one, (tuple, list, frozenset)):
        return len(one) == len(other) and (one == other if isinstance(one, frozenset) else all(map(same, one, other)))
    return isinstance(one, (int, str, bytes, torch.dtype, torch.device)) and bool(one == other)
