"""Host memory: pages of our own, and how the C library hands freed memory back to the system.

The latter decides what a budget on the CPU is worth in RAM.

glibc maps large blocks on their own up to a threshold that it raises, as they are freed, to 32 MiB. Blocks below it
come from a heap that feature maps of many sizes leave full of holes. A low fixed threshold ends that, at a price:
ResNet-50 at batch 32 took 10 s a step with glibc's own threshold and 13.5 s with 4 MiB, plain or managed (two cores,
glibc 2.36). So it is set only where memory is scarce and plain training could hardly run at all.
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

_M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_FROM_BYTES = 4 * 2**20
"""Where memory is scarce, blocks of at least this size are mapped on their own and unmapped when freed."""
SCARCE = 2.0
"""Memory is scarce when less is available than this many times the unmanaged peak."""


def whole_pages(nbytes: int) -> Tensor:
    """Zeros in memory that shares no page with any other, and that no mode of PyTorch sees. Raises OSError."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def economise(unmanaged_peak_bytes: int) -> bool:
    """Make the C library give large freed blocks back at once if memory is scarce for such a step; whether it was."""
    return available_bytes() < SCARCE * unmanaged_peak_bytes and return_freed_blocks()


def give_back() -> None:
    """Make the C library hand all memory that is free now back to the system, wherever in its heap it lies."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def return_freed_blocks() -> bool:
    """Make the C library give large freed blocks back at once, for the whole process; whether it can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))


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
