"""Delay importing torch's compiler, which takes longer than most recordings.

torch imports `torch._dynamo` at the first fake mode, the first optimizer and the first step, only to exclude these from
compilation. While a stand-in replaces it, such calls work without a compiler. Any other use imports the real one, which
then takes its place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from overspill.pytorch.fake_tensors import unset_fake_temporarily

from .patching import originals, patched

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"


@contextmanager
def no_compiler() -> Iterator[None]:
    """Import torch's compiler only when it is used, inside the block."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _StandIn(_NAME)
    stand_in.take_place()
    try:
        with patched([(torch, "_check_with", _check(torch._check_with))]):
            yield
    finally:
        stand_in.give_way()


def uncompiled(model: Any = None, *_: Any, **__: Any) -> Any:
    """Stand in for `torch.compile` where a program is recorded: return `model`, or a decorator that does."""
    return model if model is not None else (lambda function: function)


def _check(check: Callable[..., None]) -> Callable[..., None]:
    """Run `torch._check` without importing symbolic shapes for a plain boolean."""

    def check_with(error_type: Any, condition: Any, message: Any) -> None:
        if condition is not True:
            check(error_type, condition, message)

    return check_with


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _StandIn(ModuleType):
    """Stands in for the module `torch._dynamo`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = [
            str(Path(torch.__file__).parent / "_dynamo")
        ]  # for its settings, which need nothing else of it
        self.graph_break = _nothing
        self.trace_rules = SimpleNamespace(clear_lru_cache=_nothing)
        self._submodules = _Submodules(self)

    def take_place(self) -> None:
        """Become what `import torch._dynamo` finds."""
        sys.modules[_NAME] = self
        sys.meta_path.insert(0, self._submodules)
        torch._dynamo = self
        self.config = importlib.import_module(_CONFIG)

    def give_way(self) -> None:
        """Stop standing in, whether the real module is imported yet or not."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            del torch._dynamo  # torch imports it when it is asked for
        if self._submodules in sys.meta_path:
            sys.meta_path.remove(self._submodules)

    def real(self) -> Any:
        """Return the real compiler, imported with torch's own functions in place."""
        self.give_way()
        with originals(), unset_fake_temporarily():
            return importlib.import_module(_NAME)

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Exclude `function` from compilation, once the real compiler is imported. torch keeps the result."""
        if not isinstance(function, FunctionType) or options not in ({}, {"wrapping": False}):  # no code of torch's own
            return self.real().disable(function, recursive, **options)
        kept: list[Callable[..., Any]] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kept and _is_there():
                kept.append(sys.modules[_NAME].disable(function, recursive, **options))
            return (kept[0] if kept else function)(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every module
            raise AttributeError(name)
        return getattr(self.real(), name)


def _is_there() -> bool:
    module = sys.modules.get(_NAME)
    return module is not None and not isinstance(module, _StandIn)


class _Submodules(MetaPathFinder):
    """Finds submodules of the real compiler, which it imports first."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(self, fullname: str, _: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a submodule, which is most likely imported with the others."""
        if not fullname.startswith(f"{_NAME}.") or fullname == _CONFIG:
            return None
        real = self._stand_in.real()
        found = sys.modules.get(fullname)
        if found is None:
            return PathFinder.find_spec(fullname, real.__path__, target)
        return ModuleSpec(fullname, _Imported(found))


class _Imported(Loader):
    """Loads a module that is already imported, unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the imported module."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module's own spec; it has run."""
        module.__spec__ = self._spec
