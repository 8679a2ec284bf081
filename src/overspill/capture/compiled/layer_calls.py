"""Record on each traced node which module was being called.

Dynamo's nodes carry that. The nodes of a step whose Python is traced as it runs carry it too, by this module. Meanwhile
`nn.Module._call_impl` is replaced. Not `__call__`: the tracer calls the one that it knew when it was imported. Nor are
global module hooks used. They are Python state, which a capture of a training step restores before it runs the model
(`runtime/step/python_state.py`), so they would never be called.

Relies on tracers giving each node `nn_module_stack` of `fx.traceback.current_meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import traceback

from overspill.core.progress import progress
from overspill.pytorch.modules import CALL
from overspill.pytorch.patching import patched

_STACK = "nn_module_stack"


@contextmanager
def layers_noted(module: nn.Module, named: Callable[[str], str] = str) -> Iterator[None]:
    """Put the innermost called module's class and path on traced nodes, inside the block.

    The path is passed through `named`. Ops of modules outside of `module` count to their caller.
    """
    places = {id(m): (named(path), type(m)) for path, m in module.named_modules()}
    plain: Callable[..., Any] = CALL.now

    def call(called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        place = places.get(id(called))
        if place is None:
            return plain(called, *args, **kwargs)
        progress(f"capturing {place[0] or place[1].__name__}")
        # Looked up anew each time: tracers replace the dictionary.
        before = traceback.current_meta.get(_STACK)
        traceback.current_meta[_STACK] = {"innermost": place}
        try:
            return plain(called, *args, **kwargs)
        finally:
            _put_back(before)

    with patched([(*CALL, call)]):
        yield


def _put_back(before: Any) -> None:
    if before is None:
        traceback.current_meta.pop(_STACK, None)
    else:
        traceback.current_meta[_STACK] = before
