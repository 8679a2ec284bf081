"""What PyTorch's allocator hands out while something runs: compiled kernels and library calls show it to nobody else.

Relies on the profiler's memory events (2.11 to 2.13), which come from the allocator itself: `[memory]`, with a negative
number where a block is freed. Blocks that were there before are not known, nor are their ends.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on standard error that it starts and ends

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "overspill: "


class Allocations:
    """`changes` are the bytes that the allocator gave (positive) or got back, in order.

    `by_part` has those of each `part`, by its number, and `between_parts` those since the part before.
    """

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.by_part: list[list[int]] = []
        self.between_parts: list[list[int]] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """The next part, while this lasts."""
        with record_function(_MARK):
            yield


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Note what is allocated while this lasts; it is there when it is over.

    No garbage is collected meanwhile: among it may be blocks that an earlier count saw come, and that would be seen to go here.
    """
    found, collects = Allocations(), gc.isenabled()
    gc.disable()
    try:
        with profile(profile_memory=True, activities=[ProfilerActivity.CPU], acc_events=False) as profiled:
            yield found
    finally:
        if collects:
            gc.enable()
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    found.changes = [nbytes for _, nbytes in changes]
    last = 0
    for part in (event for event in events if event.name() == _MARK):
        begin, end = part.start_ns(), part.end_ns()
        found.by_part.append([nbytes for at, nbytes in changes if begin <= at <= end])
        found.between_parts.append([nbytes for at, nbytes in changes if last < at < begin])
        last = end


def peak_of(changes: Iterable[int]) -> tuple[int, int]:
    """The most bytes at once, and those at the end, from nothing."""
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most, now
