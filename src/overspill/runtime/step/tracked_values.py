"""Python values of a step that are tracked for changes.

Tracked are functions of all packages except Python, torch, NumPy and Overspill, and objects of all classes except
theirs. A logger, a lock, a file or a thread counts as unchanged, even if its contents change. The contents of their
containers are tracked.
"""

from __future__ import annotations

import argparse
import dis
import functools
import io
import random
import sys
import threading
import types
from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from overspill.pytorch.dispatch import OperatorBase, OpOverloadPacket

from .compared import same

BY_IDENTITY = (
    nn.Module, types.ModuleType, Optimizer, LRScheduler, Dataset, DataLoader, OperatorBase, OpOverloadPacket
)  # fmt: skip
"""Objects whose contents are not tracked. A module's attributes are noted when they are read. Torch's ops look up their
overloads at the first call. The others are no part of forward or loss."""
_APART = frozenset({*sys.stdlib_module_names, "torch", "numpy", "overspill", "overspill_papers"})
_OPEN = (types.SimpleNamespace, argparse.Namespace, threading.local, UserDict, UserList)
"""Standard library classes whose attributes are the user's."""


def is_tracked(module: str | None) -> bool:
    """Return whether code of this module is tracked."""
    return module is not None and module.split(".")[0] not in _APART


def is_open(value: Any) -> bool:
    """Return whether the attributes of this object are compared."""
    return isinstance(value, _OPEN) or is_tracked(type(value).__module__)


def beneath(function: Any) -> Any:
    """Return `function`, or the function that it wraps if it is a wrapper of torch.

    `torch.compile` and `torch.no_grad` make such wrappers.
    """
    while isinstance(function, types.FunctionType) and not is_tracked(function.__globals__.get("__name__")):
        if (inner := getattr(function, "__wrapped__", None)) is None:
            break
        function = inner
    return function


@lru_cache(4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and its inner functions use."""
    asked = code.co_consts if "getattr" in code.co_names else ()
    return frozenset(code.co_names).union(
        (name for name in asked if isinstance(name, str)), *map(names_of, _inner(code))
    )


@lru_cache(4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the global names that a function and its inner functions read."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*map(globals_of, _inner(code)))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (c for c in code.co_consts if isinstance(c, types.CodeType))


def within(attribute: Any) -> Any:
    """Return the function that a class attribute runs, or the attribute itself."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


def slots_of(value: Any) -> tuple[Any, ...]:
    """Return the contents of an object's slots."""
    kinds = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    slots = [name for own in kinds for name in own if isinstance(own[name], types.MemberDescriptorType)]
    return tuple(getattr(value, name, None) for name in slots)


# -- what each step would advance


def advances(value: Any) -> bool:
    """Return whether a use of `value` changes it.

    This is so for iterators, and for random generators of Python and NumPy.
    """
    if isinstance(value, io.IOBase):
        return False
    return hasattr(type(value), "__next__") or isinstance(value, _RANDOM)


def position_of(value: Any) -> Any:
    """Return how far an iterator or generator has advanced; None if unknown."""
    if isinstance(value, types.GeneratorType):
        return (value.gi_frame is None, 0 if value.gi_frame is None else value.gi_frame.f_lasti)
    if isinstance(value, torch.Generator):  # to draw from one is part of the plan, to seed it is not
        return bytes(value.get_state().tolist())
    for kind, read in _STATES.items():
        if isinstance(value, kind):
            return repr(read(value))
    if isinstance(own := getattr(value, "__dict__", None), dict):
        return tuple(own.items())
    if "__reduce__" not in vars(type(value)):
        return None
    return _parts(value.__reduce__())


def _parts(value: Any) -> Any:
    """Return the parts of an iterator, with the positions of the iterators in it."""
    if isinstance(value, tuple):
        return tuple(map(_parts, value))
    return position_of(value) if hasattr(type(value), "__next__") else value


def has_advanced(value: Any, since: Any) -> bool:
    """Return whether `value` has moved from position `since`."""
    now = position_of(value)
    return now is None or not same(now, since)


_STATES: dict[type, Callable[[Any], Any]] = {
    random.Random: lambda r: r.getstate(),
    np.random.Generator: lambda r: r.bit_generator.state,
    np.random.RandomState: lambda r: [
        part.tolist() if isinstance(part, np.ndarray) else part for part in r.get_state()
    ],
}
_RANDOM = tuple(_STATES)
