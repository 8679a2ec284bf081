"""Run a model with other tensors as its parameters and buffers.

This includes parts that backward runs again, as checkpointing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from overspill.capture.compiled.step_joint import changes_external_tensors, is_traced
from overspill.core.errors import UnsupportedError
from overspill.pytorch.functorch import WRAP_FOR_GRAD
from overspill.pytorch.modules import TABLES, as_parameter
from overspill.pytorch.patching import patched
from overspill.pytorch.trees import tree_leaves, tree_map_only

from .residency import readable
from .state import StepState
from .unpacked import holding


class Swapped:
    """The model of `state` with other tensors swapped in.

    They stay in from a call until the next one, or `close`.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._open = ExitStack()
        self.follows_references = False
        """Whether references from outside to the model's own tensors also see the swapped ones."""

    def call(self, tensors: Mapping[str, Tensor], args: tuple[Any, ...], held: Sequence[Any]) -> Any:
        """Return the result of the model for `args`, with `tensors` as its parameters and buffers.

        The objects among `args` hold the contents `held`. Raises UnsupportedError if the model replaces one of these.
        """
        self.close()
        self._open.enter_context(self._state.unguarded())
        # Find where each tensor stands in the module tables, and put the new one there.
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
            as_parameter(tensors[name])
        for table, key, name in places:
            dict.__setitem__(table, key, tensors[name])
            self._open.callback(dict.__setitem__, table, key, own[name])
        changed = self._open.enter_context(holding(args, held))
        # Run it, with hooks and outside references redirected too.
        instead = {id(own[name]): tensors[name] for name in tensors}
        follows = self.follows_references or bool(self._state.external_tensors)
        following = partial(_in_place, instead) if follows else nullcontext
        self._call_hooks(tensors, following)
        with following():
            returned = self._returned(args)
        # Refuse assignments to the swapped places.
        for table, key, name in places:
            if dict.get(table, key) is not tensors[name]:
                raise UnsupportedError(
                    f"the model assigns {readable(name)} anew in its forward; change it in place, with copy_(), or, "
                    "where it grows with the input, call the model on the longest first"
                )
        if name := changed():
            raise UnsupportedError(
                f"the step changes {name} of the batch, and a planned step would do so once, not at every step; let "
                "it work on a copy (copy.copy)"
            )
        return returned

    def _call_hooks(self, tensors: Mapping[str, Tensor], following: Callable[[], AbstractContextManager[None]]) -> None:
        """Make backward call parameter hooks with the gradients of the swapped tensors."""

        def called(hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
            with following():
                return hook(gradient)

        for name, hooks in self._state.module.gradient_hooks.items():
            if tensors[name].requires_grad:
                for hook in hooks:
                    self._open.callback(tensors[name].register_hook(partial(called, hook)).remove)

    def _returned(self, args: Sequence[Any]) -> Any:
        """Return the result of the model.

        Raises ExternalTensors if it changes tensors that are neither its own nor among `args`.
        """
        step = self._state.module.forward  # hooks of all modules are not for this one, which is none of the user's
        try:
            return step(*args)
        except (RuntimeError, UnsupportedError) as error:
            if not changes_external_tensors(error):
                raise
            with _ExternalTensors() as found:
                try:
                    step(*args)
                except Exception:  # comes again where it is not of the copies
                    if not found.tensors:
                        raise
            raise ExternalTensors(found.tensors, error) from error

    def close(self) -> None:
        """Give the model its own tensors back."""
        self._open.close()


class ExternalTensors(UnsupportedError):
    """A step changes `tensors` in place that are neither its model's nor inputs, as batch norms of another model do."""

    def __init__(self, tensors: Sequence[Tensor], error: Exception) -> None:
        super().__init__(str(error))
        self.tensors = tensors


class _ExternalTensors(TorchFunctionMode):
    """Mode that redirects changes of untraced tensors to copies. `tensors` are the ones copied."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._copies.values()]

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        new = [t for t in tree_leaves(_changed(function, args, kwargs)) if isinstance(t, Tensor) and not is_traced(t)]
        self._copies |= {
            id(t): (t, torch.zeros(t.shape, dtype=t.dtype, device=t.device)) for t in new if id(t) not in self._copies
        }
        return _on_others({key: copy for key, (_, copy) in self._copies.items()}, function, args, kwargs)


def _changed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that this torch `function` may change in place."""
    name = getattr(function, "__name__", "")
    if name in ("batch_norm", "instance_norm"):
        return args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")
    in_place = name.endswith("_") and (not name.endswith("__") or name in _IN_PLACE)
    return args[:1] if in_place else (), kwargs.get("out")


_IN_PLACE = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow")))


@contextmanager
def _in_place(instead: Mapping[int, Tensor]) -> Iterator[None]:
    """Give torch functions and transforms other tensors within the context: those in `instead`, by id."""
    wrap = WRAP_FOR_GRAD.now

    def wrapped(tensor: Any, level: int) -> Any:
        return wrap(instead.get(id(tensor), tensor), level)

    with _Instead(instead), patched([(*WRAP_FOR_GRAD, wrapped)]):
        yield


class _Instead(TorchFunctionMode):
    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_others(self._tensors, function, args, kwargs or {})


def _on_others(others: Mapping[int, Tensor], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `function` with `others` in place of the tensors with these ids.

    If it returns one of `others`, the original is returned.
    """
    before = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) in others]
    args, kwargs = tree_map_only(Tensor, lambda t: others.get(id(t), t), (args, kwargs))
    returned = function(*args, **kwargs)
    return next((t for t in before if others[id(t)] is returned), returned)  # as += assigns it
