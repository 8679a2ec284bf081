"""The contents of objects among a step's inputs.

PyTorch's trees end at objects of classes that they do not know: a dataclass, a batch of transformers or
torch_geometric, the user's own class. Their tensors are inputs of the step all the same, and their other contents are
constants of its plan. So the contents of such objects are added to the inputs, and one tree has every tensor. During a
capture, the objects themselves hold the tensors of the capture.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overspill.pytorch.trees import tree_leaves, tree_map

from .compared import array_kind
from .python_state import NotKept
from .tracked_values import BY_IDENTITY, is_open

Unpacked = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Inputs, and the contents of the tables of the objects among them."""
Table = Any
"""A container of the contents of an object: a dictionary, a list, or its slots."""
UNREAD = "is neither a tensor nor a value, and a planned step would read it once; let the batch have it as a tensor"

PLAIN = (
    int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip
"""Types whose values are equal if their repr is equal."""


class Constant:
    """A leaf of unpacked inputs that is no tensor, to be compared with another.

    It is equal if its value is. An object that holds other inputs is equal to each of its class. A leaf without a value
    is equal only to itself; it is held, so that no other object gets its id.
    """

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __hash__(self) -> int:
        return hash(type(self._leaf))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self._leaf) is not type(other._leaf):
            return False
        one, two = self._leaf, other._leaf
        if isinstance(one, PLAIN):
            return repr(one) == repr(two)
        if isinstance(one, np.ndarray):
            return array_kind(one) == array_kind(two)
        return (
            one is two
            or isinstance(one, (NotKept, weakref.ref))
            or bool(_tables_of(one))
            or (_is_by_value(one) and one == two)
        )


def _is_by_value(leaf: Any) -> bool:
    hashed: Any = type(leaf).__hash__
    return isinstance(leaf, (set, np.ndarray)) or hashed not in (None, object.__hash__)


def unpacked(inputs: tuple[Any, ...]) -> Unpacked:
    """Return `inputs` and the present contents of the objects among them.

    A leaf without a value to compare is replaced by one that raises when the step reads it.
    """
    tables = _tables(inputs)
    return inputs, tuple(tree_map(_readable, _contents(table)) for table in tables)


@contextmanager
def holding(inputs: tuple[Any, ...], contents: Sequence[Any]) -> Iterator[Callable[[], str]]:
    """Give the objects among `inputs` these `contents` within the context, in the order of `unpacked`.

    It yields a function that returns the name of a content that they no longer hold, or an empty string.
    """
    tables = _tables(inputs)
    before = [_contents(table) for table in tables]

    def changed() -> str:
        now = zip(tables, contents, strict=True)
        return next((str(key) for table, put in now for key, value in _items(put) if not _has(table, key, value)), "")

    try:
        for table, put in zip(tables, contents, strict=True):
            _fill(table, put)
        yield changed
    finally:
        for table, put in zip(tables, before, strict=True):
            _fill(table, put)


def _tables(inputs: tuple[Any, ...]) -> list[Table]:
    """Return the tables of all objects among `inputs`, and of objects that these hold."""
    seen: dict[int, Any] = {}
    found: list[Table] = []
    pending: list[Any] = [inputs]
    for value in pending:  # grows by what is found
        for leaf in tree_leaves(value):
            if id(leaf) not in seen:
                seen[id(leaf)] = leaf
                tables = _tables_of(leaf)
                found += tables
                pending += map(_contents, tables)
    return found


def _tables_of(leaf: Any) -> list[Table]:
    if isinstance(leaf, (*PLAIN, *BY_IDENTITY, Tensor, NotKept, type)) or not is_open(leaf):
        return []
    found: list[Table] = [leaf] if isinstance(leaf, (dict, list)) else []
    own = getattr(leaf, "__dict__", leaf)
    if isinstance(own, dict) and own is not leaf:
        found.append(own)
    slots = [name for kind in type(leaf).__mro__ for name in _named(vars(kind).get("__slots__", ()))]
    if slots := [name for name in slots if name[:2] != "__" and hasattr(leaf, name)]:
        found.append(_Slots(leaf, slots))
    return found


def _named(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Slots:
    """The slots of an object, with the interface of a dictionary."""

    def __init__(self, of: Any, names: Sequence[str]) -> None:
        self._of, self._names = of, names

    def keys(self) -> Sequence[str]:
        return self._names

    def __getitem__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._of, name, value)


def _contents(table: Table) -> Any:
    return list(table) if isinstance(table, list) else dict(table)


def _items(contents: Any) -> Iterator[tuple[Any, Any]]:
    return iter(enumerate(contents) if isinstance(contents, list) else contents.items())


def _has(table: Table, key: Any, value: Any) -> bool:
    held = _contents(table)
    return (len(held) > key if isinstance(held, list) else key in held) and held[key] is value


def _fill(table: Table, contents: Any) -> None:
    """Make `contents` the only contents of a table, bypassing methods of its class."""
    if isinstance(table, list):
        list.__setitem__(table, slice(None), contents)
        return
    base: Any = next(kind for kind in (OrderedDict, dict, _Slots) if isinstance(table, kind))
    for key, value in contents.items():
        base.__setitem__(table, key, value)
    for key in _contents(table).keys() - contents.keys():
        base.__delitem__(table, key)


def _readable(leaf: Any) -> Any:
    """Return `leaf`, or an object that raises in its place if it has no value to compare."""
    known = (*PLAIN, *BY_IDENTITY, Tensor, weakref.ref, types.FunctionType, types.MethodType)
    if isinstance(leaf, known) or _is_by_value(leaf) or callable(leaf) or _tables_of(leaf):
        return leaf
    return NotKept(f"a {type(leaf).__name__} of the batch", UNREAD)
