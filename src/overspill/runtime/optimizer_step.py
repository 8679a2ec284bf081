"""Run the user's own optimizer on chosen parameters, with what it keeps outside of their state put back or carried over.

No copy of an optimizer is made: what a class keeps on the object, in groups or on the class is then the user's. What
one step changes there must change once a step, in however many calls it is taken, and not at all by a trial.

Known limits: what a step changes in files, in other processes or in objects that it reaches through modules and
functions of its own is not seen.

Names private to PyTorch that this file relies on (2.11 to 2.14): the tables `_global_optimizer_pre_hooks` and
`_global_optimizer_post_hooks` of torch.optim.optimizer, `_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks` of
an optimizer; what `Optimizer.profile_hook_step` wraps; `_wrapped_by_lr_sched` of a scheduler's wrapper.
"""

from __future__ import annotations

import copy
import dis
import inspect
import logging
import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .tracker import LiveBytes

_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_OPAQUE = (ModuleType, nn.Module, type, FunctionType, MethodType, torch.dtype, torch.device, torch.Size)
"""Kinds of objects that are not looked into."""
_HARMLESS = (logging.Logger, re.Pattern, range, slice, Enum, type(print), property, weakref.ref)
"""Kinds of objects that no step changes, or not so that it matters to one."""
_PACKAGES = frozenset({"torch", "builtins", "typing"})
"""Packages whose classes keep nothing of an optimizer's."""
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
Values = dict[Any, Any]


# -- one step


def is_own(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is one of torch.optim, with the step that it has there."""
    kind = type(optimizer)
    if any(of.__module__.split(".")[:2] != ["torch", "optim"] for of in (kind, inspect.unwrap(kind.step))):
        return False
    patched = vars(optimizer).get("step")
    while patched is not None and getattr(patched, "_wrapped_by_lr_sched", False):
        patched = getattr(patched, "__wrapped__", None)
    return patched is None or patched is kind.step


def own_step(optimizer: Optimizer) -> None:
    """Call the optimizer's own `step`, be it patched on the object, without its hooks and those of all optimizers.

    Nor does a profiler get a range for it, which takes as long as the kernels of a small step.
    """
    step = type(optimizer).step
    with no_hooks(optimizer), torch.enable_grad():  # as a training loop calls it
        if "step" in vars(optimizer):
            optimizer.step()
        else:
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def no_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Context without step hooks of `optimizer`, and of all."""
    tables: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    tables += [getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


@contextmanager
def lent(optimizer: Optimizer, parameters: Mapping[int, Sequence[Tensor]]) -> Iterator[None]:
    """Context in which the group of each number has these parameters alone, and other groups have none."""
    kept = [group["params"] for group in optimizer.param_groups]
    groups = [*optimizer.param_groups]
    try:
        for number, group in enumerate(groups):
            group["params"] = [*parameters.get(number, ())]
        yield
    finally:
        for group, before in zip(groups, kept, strict=True):
            group["params"] = before


@contextmanager
def tried(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context in which `optimizer` has `parameters` alone, with the settings of `group`; then it is as before."""
    number = next(n for n, of in enumerate(optimizer.param_groups) if of["params"] is group["params"])
    outside = Outside(optimizer)
    if outside.unknown:
        raise ValueError(f"it keeps a {outside.unknown}")
    try:
        with lent(optimizer, {number: parameters}):
            optimizer.param_groups[number].update({key: v for key, v in group.items() if key != "params"})
            yield
    finally:
        outside.restore_states()
        outside.restore()


def temporary_bytes(optimizer: Optimizer, tracker: LiveBytes | None = None) -> int:
    """Take a step; return the bytes that it takes besides parameters, gradients and what is kept before it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    tracker = tracker or LiveBytes(parameters[0].device)
    # What it replaces is held, for the place of a tensor of the state stays taken.
    held = [t for p in parameters for t in (p, p.grad, *tensors_in(optimizer.state.get(p, {})).values())]
    tracker.add(held + Outside(optimizer).tensors)
    settled = tracker.peak_bytes = tracker.live_bytes
    with tracker:
        own_step(optimizer)
    del held
    return tracker.peak_bytes - settled


def copied(optimizer: Optimizer, mode: FakeTensorMode) -> Optimizer:
    """A copy for a trial in `mode`, with the same parameters, no state of theirs, and fakes of large tensors.

    Raises what cannot be copied raises, and TypeError for what may lead back to the optimizer or to the model.
    """
    made = object.__new__(type(optimizer))
    state: Any = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): made, id(optimizer.state): state}
    memo |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(t): mode.from_tensor(t.detach()) for t in Outside(optimizer).tensors if t.numel() > FEW}
    for key, value in vars(optimizer).items():
        if key == "step" and getattr(value, "_wrapped_by_lr_sched", False):
            continue  # which would step the optimizer that the scheduler was made for
        if isinstance(value, (FunctionType, nn.Module)):
            raise TypeError(f"its {key} may lead back to it")
        if not key.startswith("_optimizer_"):
            vars(made)[key] = copy.deepcopy(value, memo)
    Optimizer.__setstate__(made, {})
    return made


# -- what is kept outside of the parameters' state


@dataclass(frozen=True)
class _Place:
    """A container, as the values in it now; `write` sets all of them."""

    of: Any
    read: Callable[[], Values]
    write: Callable[[Values], None]


class Outside:
    """What an optimizer keeps besides the state of its parameters, as it is now.

    That is: settings and counters of groups, attributes, keys of `state` that are no parameters, attributes of its
    class and variables of functions that are set on the object; in containers as deep as they go, and in objects of the
    packages that the optimizer's classes are of. Others, as a logger, are the program's, and are left alone.
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
        """All tensors that it keeps there."""
        return [tensor for tensor, *_ in self._tensors]

    def changes(self) -> Changes:
        """What has changed since."""
        found = Changes()
        for number, (place, before) in enumerate(self._places):
            now = place.read()
            for key in {**before, **now}:
                if key not in now:
                    found.values[number, key] = _GONE
                elif key not in before or not _unchanged(before[key], now[key]):
                    found.values[number, key] = now[key]
        for number, (tensor, version, _) in enumerate(self._tensors):
            if tensor._version != version:
                found.tensors[number] = tensor.detach().clone()
        for number, (generator, state) in enumerate(self._generators):
            if not torch.equal(now_is := generator.get_state(), state):
                found.generators[number] = now_is
        return found

    def restore(self) -> None:
        """Put everything back."""
        self.become(Changes())

    def become(self, changes: Changes) -> None:
        """Make it what it was, with these `changes`."""
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
                elif tensor._version != version and kept is not None:
                    tensor.copy_(kept)
        for number, (generator, state) in enumerate(self._generators):
            generator.set_state(changes.generators.get(number, state))

    def restore_states(self) -> None:
        """Put the parameters' state back too, which a trial may have cleared, as far as it holds the same objects."""
        for state, before in self._states:
            if len(state) != len(before) or any(state.get(key) is not before[key] for key in before):
                state.clear()
                state.update(before)

    def keys_of(self, group: Mapping[str, Any], changes: Changes) -> set[str]:
        """Keys of `group` among the `changes`."""
        return {key for number, key in changes.values if self._places[number][0].of is group}

    def _keep(self, place: _Place) -> None:
        values = place.read()
        self._places.append((place, values))
        for value in values.values():
            self._look(value)

    def _look(self, value: Any) -> None:
        """Keep `value`, if it can change, and what is in it."""
        if isinstance(value, (*_CONSTANTS, *_OPAQUE, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            # Where there is a larger one, all parameters are updated at once, and nothing has to be put back.
            self._tensors.append((value, value._version, value.detach().clone() if value.numel() <= MANY else None))
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
        self._keep(_of_dict(own, tuple(key for key in own if key.startswith("_optimizer_"))))
        for value in [*own.values()]:
            if isinstance(value, nn.Module):
                self.unknown = self.unknown or type(value).__name__
            self._look_into(getattr(value, "__func__", value))

    def _look_into(self, function: Any) -> None:
        """Keep the variables and the global numbers and containers of a function, and of those that it wraps or calls."""
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
    """What a step has changed outside of its parameters' state: places by number and key, tensors, generators."""

    values: dict[tuple[int, Any], Any] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    generators: dict[int, Tensor] = field(default_factory=dict)

    def join(self, other: Changes) -> bool:
        """Take in the changes of a further call; whether both agree where they change the same."""
        agree = True
        for name, mine in vars(self).items():
            theirs = vars(other)[name]
            agree = agree and all(same(mine[key], theirs[key]) for key in mine.keys() & theirs.keys())
            mine.update(theirs)
        return agree

    def same_as(self, other: Changes) -> bool:
        """Whether both are to the same values."""
        return same(vars(self), vars(other))

    def keeps_much(self) -> bool:
        """Whether it is more than counters and scales: tensors as large as a parameter's."""
        held = [*self.tensors.values(), *(t for value in self.values.values() for t in tensors_in(value).values())]
        return any(tensor.numel() > FEW for tensor in held)


def _unchanged(before: Any, now: Any) -> bool:
    return before is now or (
        type(before) is type(now) and isinstance(now, (int, float, str, tuple)) and same(before, now)
    )


def same(one: Any, other: Any) -> bool:  # noqa: PLR0911 - a case for each kind of value
    """Whether two values are equal: tensors to the last bit, containers and objects by what is in them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_bits(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)  # noqa: PLR0124 - both are NaN
    if isinstance(one, (int, complex, str, bytes, set, frozenset)):
        return bool(one == other)
    return hasattr(one, "__dict__") and not isinstance(one, _OPAQUE) and same(vars(one), vars(other))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes (unlike `==`, true for equal NaNs and false for 0.0 and -0.0)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        *(t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (one, other))
    )


def tensors_in(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Tensor]:
    """The tensors that can be reached from `value`, by their path in it, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return {}
    seen.add(id(value))
    if isinstance(value, Tensor):
        return {path: value}
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        names = (f"#{n}" if isinstance(key, Tensor) else key for n, key in enumerate(value))
        inside = (
            (f"{path}[{key!r}]" if path else str(key), part) for key, part in zip(names, value.values(), strict=True)
        )
    elif isinstance(value, (list, tuple, deque)):
        inside = ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (*_OPAQUE, Optimizer)):
        inside = ((f"{path}.{name}", part) for name, part in vars(value).items())
    return {name: tensor for where, part in inside for name, tensor in tensors_in(part, where, seen).items()}


def replace_in(value: Any, tensor: Tensor, by: Tensor) -> None:
    """Put the tensor `by` in place of `tensor` wherever `value` has it, in containers and objects as deep as they go."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = [*value.items()]
    elif isinstance(value, (list, deque)):
        items = [*enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (*_OPAQUE, Tensor, Optimizer)):
        replace_in(vars(value), tensor, by)
        return
    else:
        return
    for key, part in items:
        if part is tensor:
            value[key] = by
        else:
            replace_in(part, tensor, by)


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
    """The values of a dictionary, apart from the keys `but`."""

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
    """The values of an optimizer's `state` whose keys are no parameters."""
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
    """What is set on a class, apart from what it is made of."""

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
    """The containers among the globals that a function names, and what it sets; None where there are none."""
    loaded, stored = _globals_of(function.__code__)
    space = function.__globals__
    names = [*stored, *(n for n in loaded if isinstance(space.get(n), (list, dict, set, deque)))]
    return _Place(function, lambda: {n: space[n] for n in names if n in space}, space.update) if names else None


@lru_cache(4096)
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of globals that a function loads, and of those that it sets."""
    of = {
        op: frozenset(i.argval for i in dis.get_instructions(code) if i.opname == op)
        for op in ("LOAD_GLOBAL", "STORE_GLOBAL")
    }
    return of["LOAD_GLOBAL"], of["STORE_GLOBAL"]


def _of_cell(cell: Any) -> _Place:
    """A variable of a function that is set on the object."""

    def read() -> Values:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # empty
            return {}

    def write(new: Values) -> None:
        if new:
            cell.cell_contents = new[""]

    return _Place(cell, read, write)
