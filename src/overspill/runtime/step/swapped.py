"""A model that runs with other tensors in place of its parameters and buffers, also where backward runs parts of it again.

Private to PyTorch (2.11 to 2.14): the tables of `TABLES` in a module's instance dictionary, `_wrap_for_grad`, by which transforms take a tensor in,
and `_is_param`, which makes a tensor an instance of nn.Parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from overspill.core.errors import UnsupportedError

from .residency import readable
from .state import StepState
from .structure import TABLES


class Swapped:
    """The model of `state`. From a call until the next one, or the end, it has the tensors that the call was given."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._open = ExitStack()
        self.follows_references = False
        """Whether forward finds them too where it reads the model's own by references from outside."""

    def call(self, tensors: Mapping[str, Tensor], args: Sequence[Any]) -> Any:
        """What the model returns for `args`. Raises UnsupportedError where it assigns one of its `tensors` anew."""
        self.close()
        self._open.enter_context(self._state.unguarded())
        own = {**self._state.parameters, **self._state.buffers}
        names = {id(tensor): name for name, tensor in own.items()}
        places = [
            (table, key, names[id(tensor)])
            for module in self._state.module.modules()
            for table in map(object.__getattribute__(module, "__dict__").get, TABLES[:2])
            for key, tensor in dict.items(table)
            if id(tensor) in names
        ]
        for name in self._state.parameters:
            tensors[name]._is_param = True  # so that it is an nn.Parameter
        for table, key, name in places:
            dict.__setitem__(table, key, tensors[name])
            self._open.callback(dict.__setitem__, table, key, own[name])
        instead = {id(own[name]): tensors[name] for name in tensors}
        with _in_place(instead) if self.follows_references else nullcontext():
            returned = self._state.module(*args)
        for table, key, name in places:
            if dict.get(table, key) is not tensors[name]:
                raise UnsupportedError(
                    f"the model assigns {readable(name)} anew in its forward; change it in place, with copy_()"
                )
        return returned

    def close(self) -> None:
        """Give the model its own tensors back."""
        self._open.close()


@contextmanager
def _in_place(instead: Mapping[int, Tensor]) -> Iterator[None]:
    """While this lasts functions and transforms of torch get other tensors for some, which are known by their ids."""
    wrap = eager_transforms._wrap_for_grad

    def wrapped(tensor: Any, level: int) -> Any:
        return wrap(instead.get(id(tensor), tensor), level)

    with _Instead(instead), patch.object(eager_transforms, "_wrap_for_grad", wrapped):
        yield


class _Instead(TorchFunctionMode):
    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: self._tensors.get(id(t), t), (args, kwargs or {}))
        return function(*args, **kwargs)
