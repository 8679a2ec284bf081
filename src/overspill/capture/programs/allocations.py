"""Record the blocks that PyTorch's allocator gives out while code runs.

Compiled kernels and library calls report their allocations nowhere but there. Relies on the profiler's memory events
(2.11 to 2.14). They come from the allocator itself, with an address, and a negative size if a block is freed.

Blocks from before the recording are unknown, and so are their frees. The profiler may report such a free, with the size
that it once saw at that address; it is left out.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from operator import itemgetter
from typing import Any, TypeVar

import torch

from overspill.pytorch.autograd import profiler_enabled
from overspill.pytorch.profiler import EventType, begin_recording, end_recording

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on standard error that it starts and ends


from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")
_MARK = "overspill: "


class Allocations:
    """Recorded allocations (positive) and frees (negative), in bytes and in order.

    `blocks` has the number of the block of each change. `by_part` has the changes of each `part`, `between_parts` those
    since the part before.
    """

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.blocks: list[int] = []
        self.by_part: list[list[int]] = []
        self.between_parts: list[list[int]] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """Record the block of code as the next part."""
        with record_function(_MARK):
            yield


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Record allocations inside the block; results are there once it ends."""
    found = Allocations()
    profiled = profile(profile_memory=True, activities=[ProfilerActivity.CPU], acc_events=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")  # of cycles, of which there is one (2.11)
        profiled.start()
    try:
        yield found
    finally:
        profiled.stop()
    # Changes of the whole block, then by part.
    results = profiled.profiler.kineto_results
    changes = list(_changes(results.experimental_event_tree()))
    found.blocks = [block for _, block, _ in changes]
    found.changes = [nbytes for *_, nbytes in changes]
    last = 0
    for part in sorted((e for e in results.events() if e.name() == _MARK), key=lambda event: event.start_ns()):
        begin, end = part.start_ns(), part.end_ns()
        found.by_part.append([nbytes for at, _, nbytes in changes if begin <= at <= end])
        found.between_parts.append([nbytes for at, _, nbytes in changes if last < at < begin])
        last = end


def changes_of(run: Callable[[], T]) -> tuple[T, list[int]]:
    """Return what `run` returns, and the allocations and frees of its thread alone, in bytes and in order.

    Under a profiler of the user's it runs in a thread of its own, of which that profiler sees nothing.
    """
    if not profiler_enabled():
        return _recorded(run)

    def alone() -> tuple[T, list[int]]:
        torch.get_num_threads()  # a new thread has as many as the others once it asks
        with torch.set_grad_enabled(is_grad_enabled):
            return _recorded(run)

    is_grad_enabled = torch.is_grad_enabled()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, alone).result()


def _recorded(run: Callable[[], T]) -> tuple[T, list[int]]:
    begin_recording()
    try:
        result = run()
    finally:
        changes = end_recording()
    return result, changes


def _changes(tree: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time (ns), block number and bytes of each change, for blocks that were allocated meanwhile."""
    # All memory events, from the tree of ops.
    events, left = [], [*reversed(tree)]
    while left:
        event = left.pop()
        left.extend(reversed(event.children))
        if event.tag == EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    # A free counts the bytes that its block was allocated with.
    live = dict[int, tuple[int, int]]()
    for count, (at, address, nbytes) in enumerate(sorted(events, key=itemgetter(0))):
        if nbytes > 0:
            live[address] = count, nbytes
            yield at, count, nbytes
        elif address in live:
            block, came = live.pop(address)
            yield at, block, -came


def peak_of(changes: Iterable[int]) -> tuple[int, int]:
    """Return peak bytes and bytes left at the end, starting from none."""
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most, now
