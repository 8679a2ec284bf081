"""State of an optimizer outside of the state of its parameters: counters in groups, on the object, on its class.

Known limits: changes that a step makes in files, in other processes or in objects that it reaches through modules are
not noticed.
"""

from __future__ import annotations

import dis
import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.pytorch.optimizers import OF_OPTIMIZER
from overspill.pytorch.storages import storage_key, version_of

from .reachable import OPAQUE, same, tensors_in

_HARMLESS = (logging.Logger, re.Pattern, range, slice, Enum, type(print), property, weakref.ref)
"""Kinds of objects that no step changes, or not so that it matters to one."""
_PACKAGES = frozenset({"torch", "builtins", "typing"})
"""Packages whose classes keep nothing of an optimizer's."""
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
Values = dict[Any, Any]


@dataclass(frozen=True)
class _Place:
    """A container of values."""

    of: Any
    """The container."""
    read: Callable[[], Values]
    """Returns its present values."""
    write: Callable[[Values], None]
    """Sets all its values."""


class Outside:
    """State that an optimizer now keeps outside of the state of its parameters.

    - settings and counters of groups;
    - its attributes, and those of its class;
    - keys of `state` that are no parameters;
    - variables and globals of its functions.

    Containers are searched as deep as they go; so are objects of the packages that its classes come from. Any other
    object that may change is `unknown`, and cannot be restored.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._places: list[tuple[_Place, Values]] = []
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._seen: set[int] = set()
        self._packages = {"types"}
        self._states: list[tuple[Values, Values]] = []
        self.unknown = ""
        """What it keeps that may change and cannot be put back."""
        self._look(optimizer)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the optimizer keeps there."""
        return [tensor for tensor, *_ in self._tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of their storages, each once."""
        storages = {storage_key(t): t.untyped_storage().nbytes() for t in self.tensors}
        return sum(storages.values())

    def changes(self) -> Changes:
        """Return the changes since this object was made."""
        found = Changes()
        for number, (place, before) in enumerate(self._places):
            now = place.read()
            for key in {**before, **now}:
                if key not in now:
                    found.values[number, key] = _GONE
                elif key not in before or not _unchanged(before[key], now[key]):
                    found.values[number, key] = now[key]
        for number, (tensor, version, _) in enumerate(self._tensors):
            if version_of(tensor) != version:
                found.tensors[number] = tensor.detach().clone()
        for number, (generator, state) in enumerate(self._generators):
            if not torch.equal(now_is := generator.get_state(), state):
                found.generators[number] = now_is
        return found

    def restore(self) -> None:
        """Restore all values."""
        self.become(Changes())

    def become(self, changes: Changes) -> None:
        """Restore all values, then apply these `changes`."""
        wanted: dict[int, Values] = {}
        for (number, key), value in changes.values.items():
            place = wanted.setdefault(number, dict(self._places[number][1]))
            if value is _GONE:
                place.pop(key, None)
            else:
                place[key] = value
        for number, (kept_place, before) in enumerate(self._places):
            values, now = wanted.get(number, before), kept_place.read()
            if [*now] != [*values] or any(now[key] is not values[key] for key in now):
                kept_place.write(values)
        with torch.no_grad():
            for number, (tensor, version, kept) in enumerate(self._tensors):
                if (value := changes.tensors.get(number)) is not None:
                    tensor.copy_(value)
                elif version_of(tensor) != version and kept is not None:
                    tensor.copy_(kept)
        for number, (generator, state) in enumerate(self._generators):
            generator.set_state(changes.generators.get(number, state))

    def hide_states(self) -> Values:
        """Take the state of the parameters away, which a trial is not to change, and return it."""
        hidden = {key: v for state, _ in self._states for key, v in state.items() if isinstance(key, Tensor)}
        for state, before in self._states:
            for key in before.keys() & hidden.keys():
                state.pop(key, None)
        return hidden

    def restore_states(self) -> None:
        """Put the state of the parameters back, the objects in it, not their contents."""
        for state, before in self._states:
            if len(state) != len(before) or any(state.get(key) is not before[key] for key in before):
                state.clear()
                state.update(before)

    def keys_of(self, group: Mapping[str, Any], changes: Changes) -> set[str]:
        """Return the keys of `group` among the `changes`."""
        return {key for number, key in changes.values if self._places[number][0].of is group}

    def _keep(self, place: _Place) -> None:
        values = place.read()
        self._places.append((place, values))
        for value in values.values():
            self._look(value)

    def _look(self, value: Any) -> None:
        """Record `value` and its contents, if it can change."""
        if isinstance(value, (*_CONSTANTS, *OPAQUE, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            # Where there is a larger one, all parameters are updated at once, and nothing has to be put back.
            self._tensors.append((value, version_of(value), value.detach().clone() if value.numel() <= MANY else None))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, (tuple, frozenset)):
            for part in value:
                self._look(part)
        elif isinstance(value, Optimizer):
            self._look_at_optimizer(value)
        elif (place := _place_of(value, self._packages)) is not None:
            self._keep(place)
        elif not isinstance(value, _HARMLESS):
            self.unknown = self.unknown or type(value).__name__

    def _look_at_optimizer(self, optimizer: Optimizer) -> None:
        own, state = vars(optimizer), optimizer.state
        if self._states and all(state is not known for known, _ in self._states):
            self.unknown = self.unknown or f"{type(optimizer).__name__} with a state of its own"
            self._keep(_of_dict(state))
        self._states.append((state, dict(state)))
        for kind in type(optimizer).__mro__:
            if (package := kind.__module__.partition(".")[0]) not in _PACKAGES:
                self._packages.add(package)
                self._keep(_of_class(kind))
                for method in vars(kind).values():
                    self._look_into(getattr(method, "__func__", method))
        self._seen.add(id(optimizer.state))
        self._keep(_of_state(optimizer.state))
        self._keep(_of_dict(own, tuple(key for key in own if key.startswith(OF_OPTIMIZER))))
        for value in [*own.values()]:
            if isinstance(value, nn.Module):
                self.unknown = self.unknown or type(value).__name__
            self._look_into(getattr(value, "__func__", value))

    def _look_into(self, function: Any) -> None:
        """Record the variables and the global numbers and containers of a function.

        Functions that it wraps or calls are included.
        """
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        apart = function.__module__ is None or function.__module__.partition(".")[0] in _PACKAGES
        for cell in function.__closure__ or ():
            place = _of_cell(cell)
            if not apart:
                self._keep(place)
            for value in place.read().values():
                self._look_into(value)
        if not apart:
            if (globals_ := _of_globals(function)) is not None:
                self._keep(globals_)
            for name in _globals_of(function.__code__)[0]:
                self._look_into(function.__globals__.get(name))


FEW = 64
"""Most elements of a tensor outside of state that each call of a step may change: a counter, a scale."""
MANY = 4096
"""Most elements of one that can be put back."""
_GONE = object()


@dataclass
class Changes:
    """Changes that a step has made outside of the state of its parameters."""

    values: dict[tuple[int, Any], Any] = field(default_factory=dict)
    """New values by number of the place and key."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """New values of tensors, by number."""
    generators: dict[int, Tensor] = field(default_factory=dict)
    """New states of random generators, by number."""

    def join(self, other: Changes) -> bool:
        """Add the changes of a further call; return whether both agree on what both change."""
        agree = True
        for name, mine in vars(self).items():
            theirs = vars(other)[name]
            agree = agree and all(same(mine[key], theirs[key]) for key in mine.keys() & theirs.keys())
            mine.update(theirs)
        return agree

    def same_as(self, other: Changes) -> bool:
        """Return whether both have the same new values."""
        return same(vars(self), vars(other))

    def keeps_much(self) -> bool:
        """Return whether they are more than counters and scales: tensors as large as a parameter's."""
        held = [*self.tensors.values(), *(t for value in self.values.values() for t in tensors_in(value).values())]
        return any(tensor.numel() > FEW for tensor in held)


def _unchanged(before: Any, now: Any) -> bool:
    return before is now or (
        type(before) is type(now) and isinstance(now, (int, float, str, tuple)) and same(before, now)
    )


# -- kinds of places


def _place_of(value: Any, packages: Container[str]) -> _Place | None:
    if isinstance(value, dict):
        return _of_dict(value)
    if isinstance(value, (list, deque)):
        return _of_list(value)
    if isinstance(value, set):
        return _of_set(value)
    ours = type(value).__module__.partition(".")[0] in packages
    return _of_dict(vars(value)) if ours and hasattr(value, "__dict__") else None


def _of_dict(values: Values, but: tuple[str, ...] = ("params",)) -> _Place:
    """Return the values of a dictionary, except the keys `but`."""

    def write(new: Values) -> None:
        kept = {key: values[key] for key in but if key in values}
        values.clear()
        values.update({**kept, **new})

    return _Place(values, lambda: {key: v for key, v in dict.items(values) if key not in but}, write)


def _of_list(values: Any) -> _Place:
    def write(new: Values) -> None:
        values.clear()
        values.extend(new.values())

    return _Place(values, lambda: dict(enumerate(values)), write)


def _of_set(values: set[Any]) -> _Place:
    def write(new: Values) -> None:
        values.clear()
        values.update(new)

    return _Place(values, lambda: dict.fromkeys(values), write)


def _of_state(values: Values) -> _Place:
    """Return the values of an optimizer's `state` whose keys are no parameters."""
    others: list[Any] = []
    looked = -1

    def read() -> Values:
        nonlocal others, looked
        if looked != len(values):  # there are many parameters, and this is asked for each
            others, looked = [key for key in values if not isinstance(key, Tensor)], len(values)
        return {key: values[key] for key in others if key in values}

    def write(new: Values) -> None:
        for key in read():
            del values[key]
        values.update(new)

    return _Place(values, read, write)


def _of_class(kind: type) -> _Place:
    """Return the plain values set on a class, without its methods and special attributes."""

    def read() -> Values:
        plain = (bool, int, float, str, list, dict, set, deque, tuple, Tensor)
        return {key: v for key, v in vars(kind).items() if isinstance(v, plain) and not key.startswith("__")}

    def write(new: Values) -> None:
        for key in read().keys() - new.keys():
            delattr(kind, key)
        for key, value in new.items():
            if vars(kind).get(key) is not value:
                setattr(kind, key, value)

    return _Place(kind, read, write)


def _of_globals(function: FunctionType) -> _Place | None:
    """Return the containers among the globals that a function names, and the globals it sets; None without any."""
    loaded, stored = _globals_of(function.__code__)
    space = function.__globals__
    names = [*stored, *(n for n in loaded if isinstance(space.get(n), (list, dict, set, deque)))]
    return _Place(function, lambda: {n: space[n] for n in names if n in space}, space.update) if names else None


@lru_cache(4096)
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals that a function loads, and of those that it sets."""
    of = {
        op: frozenset(i.argval for i in dis.get_instructions(code) if i.opname == op)
        for op in ("LOAD_GLOBAL", "STORE_GLOBAL")
    }
    return of["LOAD_GLOBAL"], of["STORE_GLOBAL"]


def _of_cell(cell: Any) -> _Place:
    """Return a closure variable of a function."""

    def read() -> Values:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # empty
            return {}

    def write(new: Values) -> None:
        if new:
            cell.cell_contents = new[""]

    return _Place(cell, read, write)
