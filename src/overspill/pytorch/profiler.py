"""Events of the profiler, and the older one that records the thread it was begun in alone."""

from __future__ import annotations

import torch
import torch.autograd

EventType = torch._C._profiler._EventType
"""Kinds of events; Allocation is one of the allocator."""


def begin_recording() -> None:
    """Begin to record what this thread allocates. No profiler may run in it."""
    state = torch.autograd.ProfilerState.CPU
    config = torch.autograd.ProfilerConfig(
        state, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    torch.autograd._enable_profiler_legacy(config)


def end_recording() -> list[int]:
    """Return the allocations (positive) and frees (negative) since `begin_recording`, in bytes and in order."""
    events = [event for list_ in torch.autograd._disable_profiler_legacy() for event in list_]
    return [e.cpu_memory_usage() + e.cuda_memory_usage() for e in events if e.kind() == "memory_alloc"]
