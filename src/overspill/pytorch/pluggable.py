"""Another allocator for PyTorch's CUDA memory, and its statistics in the place of the caching allocator's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.cuda import memory

from .patching import Target

STATS = Target(torch._C, "_cuda_memoryStats")
RESET_PEAKS = Target(torch._C, "_cuda_resetPeakMemoryStats")
RESET_ACCUMULATED = Target(torch._C, "_cuda_resetAccumulatedMemoryStats")


def is_started() -> bool:
    """Return whether CUDA is in use, so that its allocator can no longer be changed."""
    return torch.cuda.is_initialized()


def change_allocator(library: Path, functions: Mapping[str, int]) -> None:
    """Let PyTorch take all CUDA memory from `library`.

    `functions` are addresses by what they do: record_stream, empty_cache, base_allocation, set_fraction; and
    begin_capture, end_capture and release_pool of CUDA graphs.
    """
    changed = memory.CUDAPluggableAllocator(str(library), "overspill_malloc", "overspill_free")
    native = changed.allocator()
    native.set_record_stream_fn(functions["record_stream"])
    native.set_reset_fn(functions["empty_cache"])
    native.set_base_alloc_fn(functions["base_allocation"])
    native.set_memory_fraction_fn(functions["set_fraction"])
    native.set_begin_allocate_to_pool(functions["begin_capture"])
    native.set_end_allocate_to_pool_fn(functions["end_capture"])
    native.set_release_pool(functions["release_pool"])
    memory.change_current_allocator(changed)


def replace_statistics(stats: Callable[[int], Mapping[str, Any]], reset: Callable[[int], None]) -> None:
    """Let torch.cuda.memory_stats and what builds on it read `stats`; a pluggable allocator has none of its own."""
    for target, function in ((STATS, stats), (RESET_PEAKS, reset), (RESET_ACCUMULATED, lambda _: None)):
        setattr(target.owner, target.name, function)
