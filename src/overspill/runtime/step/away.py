"""A tensor whose bytes are in the store: any use of its values brings them back first.

The class of such a tensor becomes a subclass with a `__torch_function__`, as PyTorch does for uninitialised parameters.
A use that needs no values (shapes, gradients, hooks) moves nothing.

Known limit: C++ code that holds the tensor itself reads NaN, or 0 where it has integers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from inspect import isfunction, isgetsetdescriptor
from typing import Any

import torch
from torch import Tensor, nn

from overspill.pytorch.dispatch import TensorBase, disabled_torch_function
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.trees import tree_leaves

GUARDS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The guard of each watched tensor, by the tensor's id: an object whose `fetch()` brings it back."""
_WATCHED: dict[int, weakref.ref[Tensor]] = {}
"""The watched tensors. With a tensor goes its entry in GUARDS, for another one may get its id."""
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that return its values, or views of them."""
_METHODS = (
    "numel nelement size dim ndimension stride storage_offset element_size is_floating_point is_complex is_signed "
    "is_contiguous get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __len__"
)
_OF_C = {name: of for name, of in vars(TensorBase).items() if isgetsetdescriptor(of)}
_WITHOUT_VALUES = {torch.numel, torch.is_floating_point, torch.is_complex} | {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(way for name, of in _OF_C.items() if name not in _VALUES for way in (of.__get__, of.__set__)),
}


class Away(Tensor):
    """A tensor whose bytes are in the store."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _WITHOUT_VALUES:
            return _used(function, types, args, kwargs or {})
        # The placeholder will do, also where a capture is about to put another tensor in its place.
        return disabled_torch_function(function, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _bring(self)
        show(self)
        return copy.deepcopy(self, memo)


class AwayParameter(Away, nn.Parameter):
    """A parameter whose bytes are in the store."""


_CLASSES: dict[type[Tensor], type[Tensor]] = {Tensor: Away, nn.Parameter: AwayParameter}
_PLAIN = {away: plain for plain, away in _CLASSES.items()}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _used(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of `function` on values, by the kernels that it has without this call, not by compiled ones."""
    if function is Tensor.detach and (shown := _shown(args[0])) is not None:
        return shown
    if function is Tensor.copy_ and isinstance(args[0], Away) and _overwritten(*args, **kwargs):
        return args[0]
    found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Away)]
    if function == _OF_C["data"].__set__:
        show(args[0])
    readings = [_bring(tensor) for tensor in found]  # while they live, another thread does not step
    if any(isinstance(tensor, Away) for tensor in found):
        return disabled_torch_function(function, types, args, kwargs)
    result = function(*args, **kwargs)
    readings.clear()
    return result


def watch(tensor: Tensor, guard: Any) -> None:
    """Let `guard` bring back `tensor`, as long as both exist."""
    key = id(tensor)
    GUARDS[key] = guard
    known = _WATCHED.get(key)
    if known is None or known() is not tensor:
        _WATCHED[key] = weakref.ref(tensor, partial(_gone, key))


def _gone(key: int, tensor: weakref.ref[Tensor]) -> None:
    if _WATCHED.get(key) is tensor:
        del _WATCHED[key]
        GUARDS.pop(key, None)


def plain_type(tensor: Tensor) -> type[Tensor]:
    """Return the class that `tensor` has while its values are on the device."""
    return _PLAIN.get(type(tensor), type(tensor))


def hide(tensor: Tensor | None) -> None:
    """Make each use of the values of `tensor` call its guard first, if it has a guard."""
    if tensor is None or id(tensor) not in GUARDS or isinstance(tensor, (Away, FakeTensor)):
        return
    kind = type(tensor)
    if kind not in _CLASSES:  # a subclass, as of quantised weights
        _CLASSES[kind] = away = type(f"Away{kind.__name__}", (Away, kind), {"__getattribute__": _opening(kind)})
        _PLAIN[away] = kind
    tensor.__class__ = _CLASSES[kind]


def _opening(kind: type[Tensor]) -> Callable[[Any, str], Any]:
    """Return how attributes of a hidden tensor are read: methods that `kind` adds run on one of its own class."""
    read: Any = kind.__getattribute__
    added = {
        name
        for base in kind.__mro__
        if base not in nn.Parameter.__mro__
        for name, of in vars(base).items()
        if isfunction(of) and not name.startswith("__")
    }

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get(tensor: Any, name: str) -> Any:  # which compiled code calls too
        if name in added:
            _bring(tensor)
            show(tensor)
        return read(tensor, name)

    return get


def show(tensor: Tensor | None) -> None:
    """Give `tensor` its own class back: its values are on the device again, or lost."""
    if isinstance(tensor, Away):
        tensor.__class__ = _PLAIN[type(tensor)]


def _shown(tensor: Tensor) -> Tensor | None:
    """Return the tensor as the store has it, where its guard says so: while a state dict is made."""
    show_in_store = getattr(GUARDS.get(id(tensor)), "shown", None)
    return None if show_in_store is None else show_in_store()


def _overwritten(tensor: Tensor, source: Any, *_: Any, **__: Any) -> bool:
    """Write all of a tensor that is away, where its guard can do so in the store; return whether it has."""
    overwrite = getattr(GUARDS.get(id(tensor)), "overwrite", None)
    if overwrite is None or not isinstance(source, Tensor):
        return False
    reading = _bring(source) if isinstance(source, Away) else None
    done: bool = overwrite(source)
    del reading
    return done


def _bring(tensor: Tensor) -> Any:
    """Bring the bytes of `tensor` back; return a Reading if this is not the thread that steps."""
    if (guard := GUARDS.get(id(tensor))) is None:
        show(tensor)
        return None
    guard.fetch()
    return guard.fetch(loops=True)
