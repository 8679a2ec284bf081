"""Skip launches of Triton's kernels.

A kernel allocates nothing: it writes into tensors that it is given, whose values are unknown from then on. Overspill
does not import Triton; its launcher is replaced when the program imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from overspill.pytorch.patching import Patches, patched

from .values import real_values

_LAUNCHER = "triton.runtime.jit"


@contextmanager
def no_launches(replace: Callable[[Patches], None]) -> Iterator[None]:
    """Launch no kernel of Triton inside the block; `replace` adds patches when Triton is imported there."""
    already = sys.modules.get(_LAUNCHER)
    finder = _AtImport(lambda module: replace(_patches(module)))
    sys.meta_path.insert(0, finder)
    try:
        with patched([] if already is None else _patches(already)):
            yield
    finally:
        sys.meta_path.remove(finder)


class _AtImport(MetaPathFinder):
    """Finds Triton's launcher as Python would, and calls `found` with it once it is loaded."""

    def __init__(self, found: Callable[[ModuleType], None]) -> None:
        self._found = found

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the launcher's module, or None for all others."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _LAUNCHER else None
        if spec is not None and spec.loader is not None:
            load, found = spec.loader.exec_module, self._found

            def loaded(module: ModuleType) -> None:
                load(module)
                found(module)

            vars(spec.loader)["exec_module"] = loaded
        return spec


def _patches(module: ModuleType) -> Patches:
    return [(module.KernelInterface, "__getitem__", _launch)]


def _launch(_kernel: Any, _grid: Any) -> Callable[..., None]:
    """Return the value of `kernel[grid]`: a function of the kernel's arguments."""

    def launch(*args: Any, **kwargs: Any) -> None:
        real_values.keep([*args, *kwargs.values()], None)

    return launch
