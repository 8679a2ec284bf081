"""Counts what PyTorch's CPU allocator hands out while compiled programs run, whose allocations no dispatch mode sees.

Relies on the profiler's memory events (2.11 to 2.13), which come from the allocator itself: `[memory]`, with a negative
number where a block is freed. Blocks that were there before are not known, nor are their ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on standard error that it starts and ends

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class AllocatedBytes:
    """`peak_bytes`: the most bytes that were allocated at once, with those that were there at the start."""

    def __init__(self, there: Iterable[object]) -> None:
        """The tensors among `there` count from the start."""
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there if isinstance(t, Tensor)}
        self.start_bytes = self.peak_bytes = sum(sizes.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is allocated while this lasts."""
        with profile(profile_memory=True, activities=[ProfilerActivity.CPU], acc_events=False) as profiled:
            yield
        now = self.start_bytes
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]" and event.device_type() == torch._C._autograd.DeviceType.CPU:
                now += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, now)
