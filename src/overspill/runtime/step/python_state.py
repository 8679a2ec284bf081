"""The Python values that a captured step depends on, checked before each step.

A captured step is a graph. It has the numbers, flags, layers, hooks and functions that the Python of the model had at
the capture. A capture (`watching.py`) notes every read:

- attributes of modules (`nn.Module` reports every access);
- the contents of lists, dictionaries and plain objects found there;
- closures, defaults and globals that the user's own functions read.

`PythonState.changed` compares all of them before each step. It compares identity first, so a step of a hundred layers
is checked in a fraction of a millisecond. Equal containers may replace others, if those that were one object still are
one.

A graph would do once what the Python of the model does at every step. So `PythonState.settle` refuses a step that
changes values it has read (a counter, a cache, a list that a hook appends to). It also refuses one that reads an
iterator, or uses random numbers of Python or NumPy. A value that a model sets at its first call is no such change if
the result is the same without it (`watching.py`).

The functions that run, and the class attributes that they read, follow from the names in their code. An attribute of a
class that has been met is compared if a function uses its name.

Known limits, not noticed: reads by functions of Python, torch and NumPy, except attributes of modules
(`tracked_values.py`); names that are made as the code runs; clocks, files and the like.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import module as torch_module

from overspill.capture.compiled.step_joint import is_traced
from overspill.core.errors import UnsupportedError
from overspill.models.drawing import python_randomness, set_python_randomness
from overspill.pytorch.modules import BUFFERS, FLAT_WEIGHTS, GLOBAL_HOOKS, MODULES, PARAMETERS, TABLES
from overspill.pytorch.trees import tree_leaves

from .compared import (
    DESCRIBE,
    MISSING,
    Compared,
    array_kind,
    compared,
    contents_of,
    entries,
    items,
    parts,
    present,
    put_back,
    same,
    tensor_kind,
    value_of,
)
from .tracked_values import (
    BY_IDENTITY,
    advances,
    beneath,
    globals_of,
    has_advanced,
    is_open,
    is_tracked,
    names_of,
    position_of,
    slots_of,
    within,
)

MOST_VALUES = 50_000
"""Most Python values that are compared before each step."""
INSTEAD = "make it a tensor, an argument of the step, or a buffer; or use overspill.compile"
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type(...), Enum, torch.dtype, torch.device, torch.layout)
_CALLED = frozenset({"__call__", "__getattr__", "__getitem__", "__len__", "__bool__", "__iter__", "__contains__"})
"""Methods of an object that a function may call without naming them."""
_CALLED_BY_AUTOGRAD = {"forward", "backward", "setup_context"}
_NOT_STATE = frozenset({"__class__", PARAMETERS, BUFFERS, *FLAT_WEIGHTS})
"""Attributes compared as the model's structure (`structure.py`); the last two list a recurrent layer's parameters."""


class PythonState:
    """The Python values that one captured step has read."""

    def __init__(self) -> None:
        self._compared: list[Compared] = []
        self._empty: list[Compared] = []
        self._empty_values: list[Any] = []  # the same, which one call looks through
        self._known: dict[int, Any] = {}
        self._globals_read: dict[int, tuple[dict[str, Any], str, dict[str, Any]]] = {}
        self._looked: set[tuple[int, frozenset[str], frozenset[str]]] = set()
        # Names that functions use, the classes that have been met, and their attributes: those compared, and the rest
        # by name.
        self._used: set[str] = set()
        self._met: dict[tuple[int, bool], type] = {}
        self._taken: dict[int, tuple[type, dict[str, Any]]] = {}
        self._unused: dict[str, list[type]] = {}
        self._advancing: list[tuple[str, Any, Any]] = []
        self._modules: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self._written: dict[tuple[int, str], nn.Module] = {}
        self._created: dict[int, nn.Module] = {}
        self._registered: dict[tuple[int, str], tuple[nn.Module, dict[str, Any], Any]] = {}
        self._randomness = python_randomness()
        for hooks in GLOBAL_HOOKS:
            self._watch(hooks, "the hooks of all modules")

    def changed(self) -> str:
        """Return the name of a value that differs from the capture, or an empty string."""
        if any(self._empty_values):
            return next(found for one in self._empty if (found := one.changed()))
        # By identity first, which is fast; then one by one.
        moved = False
        for one in self._compared:
            read, where, values, _ = one
            try:
                if all(map(is_, read(where), values)):
                    continue
            except (KeyError, ValueError):
                pass
            if changed := one.changed():
                return changed
            moved |= read not in DESCRIBE
        return self._rearranged() if moved else ""

    def _rearranged(self) -> str:
        """Return the name of an equal container that is no longer the same object as another, if any.

        Also one that has become the same object (`a is b`). An empty string if none has changed.
        """
        after: dict[int, Any] = {}
        before: dict[int, Any] = {}
        for read, where, values, names in self._compared:
            if read in DESCRIBE or isinstance(where, (list, frozenset)):  # reached from what holds it now
                continue
            for number, (then, now) in enumerate(zip(values, read(where), strict=True)):
                for one, other in parts(then, now):
                    if after.setdefault(id(one), other) is not other or before.setdefault(id(other), one) is not one:
                        return (named := names())[min(number, len(named) - 1)]
        return ""

    # -- while the step is captured

    def begin_module(self, module: nn.Module) -> None:
        """Ignore a module that the step itself makes."""
        self._created[id(module)] = module

    def read(self, module: nn.Module, name: str) -> None:
        """Note that attribute `name` of `module` is read, with its value."""
        if name in _NOT_STATE or id(module) in self._created or (id(module), name) in self._written:
            return
        _, names = self._modules.setdefault(id(module), (module, {}))
        if name in names or (name == "__dict__" and sys._getframe(2).f_code.co_filename == torch_module.__file__):
            return
        # A read of `__dict__` is a read of all in it.
        own = object.__getattribute__(module, "__dict__")
        label = f"{type(module).__name__}.{name}"
        if name == "__dict__":
            for key in [key for key in own if key not in TABLES]:
                self.read(module, key)
            return
        # Follow what the attribute holds, or the class's if the object has none.
        names[name] = value = own.get(name, MISSING)
        if name in own:
            self._watch(value, label)
        elif not any(name in own.get(table, ()) for table in TABLES):
            for owner in type(module).__mro__:
                if name in vars(owner) and is_tracked(owner.__module__):
                    for inner, of in self._take(owner, name):
                        self._watch(inner, of)

    def write(self, module: nn.Module, name: str) -> None:
        """Note that attribute `name` of `module` is about to be set."""
        own = object.__getattribute__(module, "__dict__")
        read = name in self._modules.get(id(module), (module, {}))[1]
        table = next((own[t] for t in TABLES if name in own.get(t, ())), None)
        if table is not None and not _is_fake(table[name]):  # of a module that is not the step's own
            self._registered.setdefault((id(table), name), (module, table, table[name]))
        elif table is None and id(module) not in self._created and not read:
            self._written[id(module), name] = module

    def settle(self) -> None:
        """End the capture.

        Raises UnsupportedError if the step does what a graph would do only once, and Changed if it may.
        """
        if spoiled := self.put_back():
            raise Changed(spoiled[0], self, for_good=True)
        self.drop_fakes()
        # Compare the attributes and globals read from now on.
        for module, names in self._modules.values():
            self._compare_attributes(module, names)
        of_classes = [(vars(owner), owner.__name__, names) for owner, names in self._taken.values()]
        for namespace, where, values in (*self._globals_read.values(), *of_classes):
            if values:
                self._compared.append(compared(namespace, (*values,), (*values.values(),), where))
        # Refuse iterators that moved, values that changed, and random numbers drawn.
        if advanced := next((label for label, value, since in self._advancing if has_advanced(value, since)), ""):
            raise UnsupportedError(
                f"{advanced} is an iterator or a random generator, which a planned step would advance once; {INSTEAD}"
            )
        if changed := self.changed():
            raise Changed(changed, self)
        if not _same_randomness(self._randomness, python_randomness()):
            set_python_randomness(self._randomness)
            raise UnsupportedError(
                "the step draws random numbers of Python or NumPy, which a planned step would do once, not at every "
                "step; draw them with torch, or before the step and give them as its argument"
            )
        self._written.clear()
        self._created.clear()

    def put_back(self) -> list[str]:
        """Restore buffers and parameters that the step has replaced, and return their names.

        Those of modules that the step itself makes are left out.
        """
        found = []
        for (_, name), (module, table, before) in self._registered.items():
            if _is_fake(table.get(name)):
                table[name] = before
                found.append(f"{type(module).__name__}.{name}")
        return found

    def drop_fakes(self) -> None:
        """Remove fake tensors from attributes that the step has set.

        A later read of one raises an error. Attributes that the step had read before get their old values back, and
        Changed is raised.
        """
        for (_, name), module in self._written.items():
            if _holds_fakes(module, name):
                object.__setattr__(module, name, NotKept(f"{type(module).__name__}.{name}"))
        # Of attributes and containers that the step reads, fakes are an error.
        spoiled = [
            f"{type(m).__name__}.{name}"
            for m, names in self._modules.values()
            for name in names
            if _holds_fakes(m, name)
        ]
        holders = [c for c in (*self._compared, *self._empty) if c.read is items and any(map(_is_fake, items(c.where)))]
        spoiled += [c.names()[0] for c in holders if not isinstance(c.where, dict)]
        if spoiled:
            self.undo()
            raise Changed(spoiled[0], self, for_good=True)
        # Those that a hook puts into a dictionary of features are as attributes that the step has set.
        for holder in reversed(holders):  # what is within a container comes behind it
            before = dict(entries(holder.values))
            for key, value in holder.where.items():
                if _is_fake(value):
                    old = before.get(key)
                    holder.where[key] = old if isinstance(old, NotKept) else NotKept(f"{holder.names()[0]}[{key!r}]")

    def undo(self) -> None:
        """Restore module attributes and containers that the step has changed."""
        for module, names in self._modules.values():
            own = object.__getattribute__(module, "__dict__")  # it may be within a capture still
            for name, before in list(names.items()):
                if name in own and not same(own[name], before):
                    if before is MISSING:
                        del own[name]
                    else:
                        own[name] = before
        for one in (*self._compared, *self._empty):
            if one.read is items and one.changed():
                put_back(one.where, one.values)

    def _compare_attributes(self, module: nn.Module, names: dict[str, Any]) -> None:
        own = object.__getattribute__(module, "__dict__")
        for table, values in ((own, names), (own[MODULES], own[MODULES])):
            if here := tuple(n for n in names if n in table):
                self._compared.append(compared(table, here, tuple(values[n] for n in here), type(module).__name__))
        # Attributes that were missing, or have gone, are compared too.
        absent = frozenset(
            n for n in names if names[n] is MISSING and n not in own and not any(n in own[t] for t in TABLES)
        )
        vanished = [n for n in names if names[n] is not MISSING and n not in own]
        if absent:
            read = functools.partial(present, absent)
            self._compared.append(
                Compared(read, own, (0,), lambda: [f"{type(module).__name__}.{n}" for n in read(own)[1:]])
            )
        for name in vanished:
            self._compared.append(compared(own, (name,), (names[name],), type(module).__name__))

    # -- what values hold

    def _watch(self, value: Any, label: str) -> None:
        """Track `value` and all that it holds, to compare later."""
        pending = [(value, label)]
        while pending:
            value, label = pending.pop()
            if isinstance(value, (*_ATOMS, *BY_IDENTITY)) or id(value) in self._known:
                continue
            if len(self._known) > MOST_VALUES:
                raise UnsupportedError(
                    f"the step reads {label}, with more than {MOST_VALUES} values to compare; {INSTEAD}"
                )
            self._known[id(value)] = value
            pending.extend(self._contents(value, label))

    def _contents(self, value: Any, label: str) -> Iterable[tuple[Any, str]]:
        """Compare `value` itself later; return its contents with names."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            return self._callable(value, label)
        if isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
            return self._container(value, label)
        # Tensors by metadata, arrays by checksum, iterators by position.
        if isinstance(value, Tensor):
            if not _is_of_capture(value):
                self._compare(tensor_kind, value, label)
        elif isinstance(value, np.ndarray):
            self._compare(array_kind, value, label)
        elif advances(value) or isinstance(value, torch.Generator):
            self._advancing.append((label, value, position_of(value)))
        elif isinstance(value, functools._lru_cache_wrapper):
            return [(value.__wrapped__, label)]
        elif isinstance(value, ContextVar):
            self._compare(value_of, value, label)
            return [(inner, label) for inner in value_of(value)]
        elif isinstance(value, type) or is_open(value):
            return self._object(value, label)
        return ()

    def _object(self, value: Any, label: str) -> list[tuple[Any, str]]:
        """Compare the attributes of an object later, and those of its class that are used; return them with names.

        Of a class, only the attributes that are used are compared.
        """
        if isinstance(value, type):
            special = {n for n in vars(value) if n[:2] == "__" and callable(vars(value)[n])}
            return self._meet(value, special | _CALLED_BY_AUTOGRAD if issubclass(value, Function) else special)
        label = f"{label} ({type(value).__name__})"
        found = self._meet(type(value), _CALLED)
        if isinstance(own := getattr(value, "__dict__", None), dict):
            found += self._container(own, label)
        if slots := slots_of(value):
            self._compare(slots_of, value, label)
        return [*found, *((inner, label) for inner in slots)]

    def _container(self, value: Any, label: str) -> Iterable[tuple[Any, str]]:
        if not isinstance(value, (tuple, frozenset)) and not any(map(_is_of_capture, items(value))):
            # What holds tensors of the capture now (an RNN's list of its weights) holds the parameters else.
            if value:
                self._compare(items, value, label)
            else:
                self._empty.append(Compared(items, value, (0,), lambda: [label]))
                self._empty_values.append(value)
        return [(inner, label) for inner in (value.values() if isinstance(value, Mapping) else value)]

    def _callable(self, value: Any, label: str) -> Iterable[tuple[Any, str]]:
        if isinstance(value, types.FunctionType):
            inner = beneath(value)
            return self._function(value) if inner is value else [(inner, label)]
        is_method = isinstance(value, types.MethodType)
        found = self._method(value) if is_method else (value.func, value.args, value.keywords)
        return [(inner, label) for inner in found]

    def _function(self, value: types.FunctionType) -> Iterable[tuple[Any, str]]:
        if not is_tracked(value.__globals__.get("__name__")):
            return ()
        # Its defaults, its closure, and the globals that it reads.
        found: list[tuple[Any, str]] = [
            (of, f"a default of {value.__name__}") for of in (value.__defaults__, value.__kwdefaults__)
        ]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self._compare(contents_of, cell, f"{name} of {value.__name__}")
            found += [(inner, f"{name} of {value.__name__}") for inner in contents_of(cell)]
        if value.__dict__:
            found.append((value.__dict__, value.__name__))
        code = value.__code__
        where = value.__globals__
        used = names_of(code)
        found.extend(self._globals(where, globals_of(code), used, str(where.get("__name__"))))
        for name in filter(is_tracked, sorted(used & sys.modules.keys())):  # imported in the function
            found.extend(self._globals(vars(sys.modules[name]), used, used, name))
        return [*found, *self._use(used)]

    def _method(self, method: types.MethodType) -> Sequence[Any]:
        """Return the functions of a bound method, and the attributes that they name.

        Other attributes of its object are left out, because they may be many.
        """
        of, functions = method.__self__, [beneath(method.__func__)]
        if isinstance(of, nn.Module):
            return functions
        if not isinstance(getattr(of, "__dict__", None), dict):
            return [*functions, of]
        used: set[str] = set()
        for function in functions:  # grows by the methods that are called
            new = names_of(function.__code__) - used if isinstance(function, types.FunctionType) else set()
            used |= new
            functions += [
                f
                for name in sorted(new)
                for kind in type(of).__mro__
                if isinstance(f := beneath(within(vars(kind).get(name))), types.FunctionType)
            ]
        names = tuple(sorted(used & vars(of).keys()))
        if names:
            self._compared.append(compared(vars(of), names, tuple(vars(of)[n] for n in names), type(of).__name__))
        return [*functions, type(of), *(vars(of)[n] for n in names)]

    def _globals(
        self, namespace: dict[str, Any], read: frozenset[str], used: frozenset[str], where: str
    ) -> list[tuple[Any, str]]:
        """Return the values that a function reads from its module and from modules found there.

        The function names all of `used`.
        """
        if (id(namespace), read, used) in self._looked:
            return []
        self._looked.add((id(namespace), read, used))
        _, _, known = self._globals_read.setdefault(id(namespace), (namespace, where, {}))
        found = []
        for name in sorted(read & namespace.keys()):
            value = known.setdefault(name, namespace[name])
            if isinstance(value, types.ModuleType):
                if is_tracked(value.__name__):
                    found.extend(self._globals(vars(value), used, used, value.__name__))
            else:
                found.append((value, f"{where}.{name}"))
        return found

    def _meet(self, kind: type, special: AbstractSet[str]) -> list[tuple[Any, str]]:
        """Return the attributes of a class that functions use, and its `special` methods; its rest waits for a use."""
        found: list[tuple[Any, str]] = []
        for owner in kind.__mro__:
            if (id(owner), special is _CALLED) in self._met or not is_tracked(owner.__module__):
                continue
            self._met[id(owner), special is _CALLED] = owner
            for name in vars(owner):
                if name in self._used or name in special:
                    found += self._take(owner, name)
                else:
                    self._unused.setdefault(name, []).append(owner)
        return found

    def _use(self, names: frozenset[str]) -> list[tuple[Any, str]]:
        """Return the attributes under these names of the classes met so far; a function uses the names."""
        new = {name for name in names - self._used if name[:2] != "__"}  # what Python or dataclasses make is no state
        self._used |= new
        return [f for name in sorted(new) for owner in self._unused.pop(name, ()) for f in self._take(owner, name)]

    def _take(self, owner: type, name: str) -> list[tuple[Any, str]]:
        """Compare a class attribute later: a method that may be replaced, or a constant; return its value."""
        _, names = self._taken.setdefault(id(owner), (owner, {}))
        if name in names:
            return []
        names[name] = value = vars(owner)[name]
        return [(within(value), f"{owner.__name__}.{name}")]

    def _compare(self, read: Callable[[Any], Sequence[Any]], where: Any, label: str) -> None:
        self._compared.append(Compared(read, where, tuple(read(where)), lambda: [label]))


class Changed(UnsupportedError):
    """The step changes `what`, a value that it has read.

    Unless `for_good`, a second capture shows whether that matters.
    """

    def __init__(self, what: str, state: PythonState, *, for_good: bool = False) -> None:
        super().__init__(
            f"the step's Python changes {what}, and a planned step would do so once, not at every step; {INSTEAD}. "
            "Where it is made at a first call only, call the model once before"
        )
        self.state = state
        self.for_good = for_good


class NotKept:
    """Stands in an attribute that forward set to a tensor, and raises when used, with the reason `why`."""

    def __init__(
        self,
        name: str,
        why: str = (
            "is set by the model's forward, and a planned step does not keep it; let the loss function return it "
            "beside the loss, or call the model before you read it"
        ),
    ) -> None:
        self.__dict__["_said"] = f"{name} {why}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        next(leaf for leaf in tree_leaves(args) if isinstance(leaf, cls))._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(self.__dict__["_said"])

    __bool__ = __len__ = __iter__ = __float__ = __int__ = __getitem__ = __add__ = __mul__ = __sub__ = __truediv__ = (
        _refuse
    )


def _holds_fakes(module: nn.Module, name: str) -> bool:
    return _is_fake(module.__dict__.get(name))


def _is_fake(value: Any) -> bool:
    return any(map(_is_of_capture, tree_leaves(value)))


def _is_of_capture(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_traced(leaf)


def _same_randomness(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))
