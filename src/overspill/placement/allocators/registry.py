"""The allocators by name. An allocator is one file here, one header of the native core, and one line in the registry."""

from __future__ import annotations

from typing import Any

from overspill.core.registry import Registry

from . import native as native_core
from .base import Allocator
from .best_fit import BestFitAllocator
from .bfc import BfcAllocator
from .buddy import BuddyAllocator
from .caching import CachingAllocator
from .chainer import ChainerAllocator
from .chunked import ChunkedAllocator
from .cnmem import CnmemAllocator
from .mxnet import MxnetAllocator
from .python_allocator import PythonAllocator
from .two_ended import TwoEndedAllocator

ALLOCATORS: Registry[type[PythonAllocator]] = Registry(
    "allocator",
    "allocators",
    {
        allocator.name: allocator
        for allocator in (
            CachingAllocator,
            BfcAllocator,
            MxnetAllocator,
            ChainerAllocator,
            CnmemAllocator,
            TwoEndedAllocator,
            ChunkedAllocator,
            BestFitAllocator,
            BuddyAllocator,
        )
    },
)


def allocator_type(name: str) -> type[PythonAllocator]:
    """The class of the allocator registered as `name`. Raises RequestError with the names that exist."""
    return ALLOCATORS.named(name)


def allocator_named(
    name: str, config: Any = None, *, capacity_bytes: int | None = None, native: bool = False
) -> Allocator:
    """The allocator registered as `name`, over an empty device of `capacity_bytes` (None: unlimited).

    In Python; `native` gives its compiled twin where that is built.
    """
    twin = allocator_type(name)
    if native and native_core.AVAILABLE:
        core = native_core.NativeAllocator(name, twin.config_type, config, capacity_bytes=capacity_bytes)
        core.coalesces = twin.coalesces
        return core
    return twin(config, capacity_bytes=capacity_bytes)
