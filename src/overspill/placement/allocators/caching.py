"""PyTorch's caching allocator; its rules are in native/allocators/caching.hpp and expandable.hpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from . import _native
from .caching_config import CachingConfig
from .native_allocator import NativeAllocator

# Constants of c10/core/AllocatorConfig.h, torch 2.13.
MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20


class CachingAllocator(NativeAllocator):
    """PyTorch's CUDA allocator, without graph capture and `record_stream`."""

    name = core = "pytorch"
    summary: ClassVar = "PyTorch's caching allocator"
    source: ClassVar = "c10/cuda/CUDACachingAllocator.cpp, pytorch 001074d2 and later; settings of torch 2.13"
    config_type: ClassVar = CachingConfig
    config: CachingConfig


def round_size(nbytes: int, divisions: Sequence[int]) -> int:
    """Return the bytes of the block for a request of `nbytes`: rounded to 512, or to a division of a power of 2."""
    return _native.round_size(nbytes, divisions)
