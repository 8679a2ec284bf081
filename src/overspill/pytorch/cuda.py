"""Memory and streams of a CUDA device. A build of PyTorch without CUDA has some of these names only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import memory

from .patching import Target

EMPTY_HOST_CACHE = Target(torch._C, "_host_emptyCache")
"""What gives pinned memory back."""
RAW_STREAM = Target(torch._C, "_cuda_getCurrentRawStream")
"""What gives the address of a device's current stream, by its number."""
LAZY_INIT = "_lazy_init"
"""The function of torch.cuda that initialises the device."""


def raw_stream_getter() -> Callable[[int], int] | None:
    """Return the function from a device's number to its current stream's address, or None in a build without CUDA."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_history_recorded() -> bool:
    """Return whether the allocator records its history."""
    return torch._C._cuda_isHistoryEnabled()


def record_history(entries: int) -> None:
    """Let the allocator record up to so many allocations and frees, with Python's stack."""
    memory._record_memory_history("all", context="alloc", stacks="python", max_entries=entries, clear_history=True)


def end_history() -> None:
    """Let the allocator record no more."""
    memory._record_memory_history(None)


def history() -> dict[str, Any]:
    """Return the recorded history, and the current segments."""
    return memory._snapshot()


def label() -> str:
    """Return the text that allocations are recorded with now."""
    return memory._get_memory_metadata()


def set_label(text: str) -> None:
    """Record allocations with this text from now on."""
    memory._set_memory_metadata(text)
