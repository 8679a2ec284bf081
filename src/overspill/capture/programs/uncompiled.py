"""Import a program that Inductor wrote without compiling its kernels, which are compiled once it is to run.

Inductor first writes a program's text, and has its kernels compiled while it imports that text as a module. Only one of
several partitions runs, and compilers take most of the time. So kernels wait until a plan has been chosen.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

KERNEL = "UncompiledKernel"
"""Name, in the namespace of a module imported uncompiled, of the function that makes its kernels."""
_COMPILES = "async_compile."
_one_at_a_time = threading.RLock()


class UncompiledKernel:
    """A kernel that cannot run yet.

    `compiled` imports its module again, and has it compiled the first time.
    """

    def __init__(self, name: str, load: Callable[[], ModuleType]) -> None:
        self._name = name
        self._load = load

    def compiled(self) -> Any:
        """Return the kernel, compiled with all others of its module."""
        return getattr(self._load(), self._name)


def compiled(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return `namespace` with its kernels compiled. Raises the compiler's errors."""
    return {n: v.compiled() if isinstance(v, UncompiledKernel) else v for n, v in namespace.items()}


@contextmanager
def kernels_later() -> Iterator[None]:
    """Leave kernels that this thread compiles with Inductor uncompiled for now, inside the block."""
    from overspill.pytorch.inductor import PyCodeCache  # noqa: PLC0415 - Inductor takes seconds to import

    with _one_at_a_time:
        load, thread = PyCodeCache.load_by_key_path, threading.get_ident()

        def load_uncompiled(key: str, path: str, *rest: Any, **options: Any) -> ModuleType:
            loaded = cache(partial(load, key, path, *rest, **options))
            if threading.get_ident() != thread:
                return loaded()
            attrs = options.get("attrs", rest[1] if len(rest) > 1 else None)
            made = import_uncompiled(key, path, attrs, lambda name: UncompiledKernel(name, loaded))
            return loaded() if made is None else made  # a kernel that is timed, perhaps

        with patch.object(PyCodeCache, "load_by_key_path", load_uncompiled):
            yield


def import_uncompiled(
    key: str, path: str, attrs: Mapping[str, Any] | None, make_kernel: Callable[[str], Any]
) -> ModuleType | None:
    """Return the program at `path` as a module, or None if it has no kernels to compile.

    `make_kernel` makes its kernels from their names; `attrs` are its constants.
    """
    source = Path(path).read_text(encoding="utf-8")
    if _COMPILES not in source:
        return None
    text = ast.parse(source)
    text.body = [kept for statement in text.body if (kept := _uncompiled(statement)) is not None]
    module = ModuleType(f"overspill.uncompiled.{key}")
    module.__file__ = path
    module.__dict__.update({KERNEL: make_kernel, "key": key})
    # Its lines are none of the user's.
    code = compile(ast.fix_missing_locations(text), "<Inductor's program>", "exec")
    exec(code, module.__dict__)  # noqa: S102 - what Inductor wrote
    module.__dict__.update(attrs or {})
    return module


def _uncompiled(statement: ast.stmt) -> ast.stmt | None:
    """Return the statement with a kernel that is not compiled, or None if it only waits for kernels."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.Expr)) else None
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).startswith(_COMPILES):
        return statement
    if isinstance(statement, ast.Assign):
        name = ast.Constant(ast.unparse(statement.targets[0]))
        statement.value = ast.Call(ast.Name(KERNEL, ast.Load()), [name], [])
        return statement
    return None
