"""Host memory: pages of our own, and how the C library hands freed memory back to the system.

The latter decides what a budget on the CPU is worth in RAM.

glibc maps large blocks on their own up to a threshold that it raises, as they are freed, to 32 MiB. Blocks below it
come from a heap that feature maps of many sizes leave full of holes. A low fixed threshold ends that, at a price:
ResNet-50 at batch 32 took 10 s a step with glibc's own threshold and 13.5 s with 4 MiB, plain or managed (two cores,
glibc 2.36). So it is set only where memory is scarce and plain training could hardly run at all.

Where it is not, the opposite helps. Under a plan the end of the heap is free again and again within a step, when feature maps
have left, and glibc gives more than 64 MiB of it back, to fault it in anew: a step of ResNet-50 at batch 8 within half of its
memory had 60 000 page faults by Inductor's kernels, plain training 6 000. With the end kept it has 7.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import resource
from pathlib import Path

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_FROM_BYTES = 4 * 2**20
"""Where memory is scarce, blocks of at least this size are mapped on their own and unmapped when freed."""
MOST_MAPPED_FROM_BYTES = 32 * 2**20
"""What glibc itself raises that threshold to. To set any of them ends that, so it is set with the other."""
MOST_KEPT_BYTES = 2**31 - 2**20
"""The largest threshold that `mallopt` takes, which is an int."""
SCARCE = 2.0
"""Memory is scarce when less is available than this many times the unmanaged peak."""

_is_scarce = False


def whole_pages(nbytes: int) -> Tensor:
    """Zeros in memory that shares no page with any other, and that no mode of PyTorch sees. Raises OSError."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def suit_heap(unmanaged_peak_bytes: int) -> bool:
    """Make the C library give large freed blocks back at once if memory is scarce for such a step, else keep the heap's free end.

    For the whole process; once scarce is scarce for good. Returns whether blocks are given back.
    """
    global _is_scarce  # noqa: PLW0603 - of the process, as the C library's thresholds are
    _is_scarce = _is_scarce or available_bytes() < SCARCE * unmanaged_peak_bytes
    if _is_scarce:
        return return_freed_blocks()
    _set_thresholds(MOST_MAPPED_FROM_BYTES, MOST_KEPT_BYTES)
    return False


def give_back() -> None:
    """Make the C library hand all memory that is free now back to the system, wherever in its heap it lies."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def return_freed_blocks() -> bool:
    """Make the C library give large freed blocks back at once, for the whole process; whether it can."""
    return _set_thresholds(MAPPED_FROM_BYTES, MAPPED_FROM_BYTES)


def _set_thresholds(mapped_from_bytes: int, trimmed_from_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, trimmed_from_bytes))


def available_bytes() -> int:
    """Bytes that this process can still take: the least of free RAM, its address-space limit and its control group's."""
    limits = [_status(Path("/proc/meminfo"), "MemAvailable")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - _status(Path("/proc/self/status"), "VmSize"))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits)


def _status(path: Path, key: str) -> int:
    """A `key: N kB` line of a /proc file, in bytes; without such a file, more than any machine has."""
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
    except (OSError, StopIteration):
        return 2**62
    return int(line.split()[1]) * 1024
