"""Allocators by name.

An allocator is one file here, or of another package, and one header of the native core.
"""

from __future__ import annotations

from typing import Any

from overspill.core.registry import Registry, classes_in

from . import native as native_core
from .base import Allocator
from .python_allocator import PythonAllocator

ALLOCATORS: Registry[type[PythonAllocator]] = Registry(
    "allocator",
    "allocators",
    classes_in(__name__.rpartition(".")[0], PythonAllocator),  # type: ignore[type-abstract]
    papers=("buddy", "chainer", "cnmem", "mxnet", "tensorflow"),
    by_name=True,
)


def allocator_type(name: str) -> type[PythonAllocator]:
    """The allocator class registered as `name`. Raises RequestError with the names that exist."""
    return ALLOCATORS.named(name)


def allocator_named(
    name: str, config: Any = None, *, capacity_bytes: int | None = None, native: bool = False
) -> Allocator:
    """The allocator registered as `name`, over an empty device.

    The device has `capacity_bytes` (None: unlimited). In Python; `native` gives its counterpart in C++ where there is
    one.
    """
    python = allocator_type(name)
    if native and native_core.has(name):
        core = native_core.NativeAllocator(name, python.config_type, config, capacity_bytes=capacity_bytes)
        core.coalesces = python.coalesces
        return core
    return python(config, capacity_bytes=capacity_bytes)
