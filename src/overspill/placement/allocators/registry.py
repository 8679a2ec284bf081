"""Allocators by name.

An allocator is one file here, or of another package. Its rules are in Python, or in a header of the native core.
"""

from __future__ import annotations

from typing import Any

from overspill.core.registry import Registry, classes_in

from .base import Allocator

ALLOCATORS: Registry[type[Allocator]] = Registry(
    "allocator",
    "allocators",
    classes_in(__name__.rpartition(".")[0], Allocator),
    papers=("best-fit", "buddy", "chainer", "cnmem", "mxnet", "tensorflow"),
    by_name=True,
)


def allocator_type(name: str) -> type[Allocator]:
    """Return the allocator class registered as `name`. Raises RequestError with the known names."""
    return ALLOCATORS.named(name)


def allocator_named(name: str, config: Any = None, *, capacity_bytes: int | None = None) -> Allocator:
    """Return the allocator registered as `name`, over an empty device of `capacity_bytes` (None: unlimited)."""
    return allocator_type(name)(config, capacity_bytes=capacity_bytes)
