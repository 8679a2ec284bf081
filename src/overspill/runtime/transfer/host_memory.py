"""Host memory: page-aligned buffers, and when glibc returns freed memory.

The latter decides how much RAM a budget on the CPU saves.

glibc gives large blocks their own mapping, from a threshold on. As they are freed, it raises the threshold to 32 MiB.
Blocks below it come from a heap that activations of many sizes leave full of holes. A low fixed threshold ends that, at
a price. ResNet-50 at batch 32 took 10 s a step with glibc's own threshold and 13.5 s with 4 MiB. That was on two cores
with glibc 2.36, with or without Overspill. So it is set only if memory is scarce and a run without Overspill could
hardly work at all.

If memory is not scarce, the opposite helps. Under a plan, the end of the heap becomes free many times within a step,
when activations have left. glibc returns free ends over 64 MiB to the system, and later pages them in again. With
Inductor's kernels, a step of ResNet-50 at batch 8 within half of its memory had 60 000 page faults; without Overspill,
6 000. With the end kept it has 7.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MAP_FIXED, _MAP_FAILED = 0x10, 2**64 - 1  # sys/mman.h
MAPPED_FROM_BYTES = 4 * 2**20
"""Where memory is scarce, blocks of at least this many bytes get their own mapping, unmapped when freed."""
MOST_MAPPED_FROM_BYTES = 32 * 2**20
"""The most that glibc itself raises that threshold to. Setting either threshold ends that, so both are set together."""
MOST_KEPT_BYTES = 2**31 - 2**20
"""The largest threshold that `mallopt` takes, which is an int."""
SCARCE = 2.0
"""Memory is scarce when less is available than this many times the unmanaged peak."""

_MAPS = Path("/proc/self/maps")
_GROUPS, _GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_GROUP_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "": ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
}
"""Limit, use, and the counters of memory.stat that can be dropped, by controller: versions 1 and 2 of control
groups."""

_is_scarce = False


def whole_pages(nbytes: int) -> Tensor:
    """Return a uint8 tensor of zeros, `[nbytes]`, in its own pages and unseen by PyTorch's modes. Raises OSError."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


@contextlib.contextmanager
def in_a_row(parts: Iterable[tuple[int, int, int]]) -> Iterator[int]:
    """Map parts of files (descriptor, offset, bytes: whole pages) one behind the other; yield the address.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def mapped(address: int | None, nbytes: int, access: int, flags: int, file: int, offset: int) -> int:
        found: int = libc.mmap(address, nbytes, access, flags, file, offset)
        if found == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    parts = [*parts]
    whole = sum(nbytes for _, _, nbytes in parts)
    first = here = mapped(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        for file, offset, nbytes in parts:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
            here = mapped(here, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset) + nbytes
        yield first
    finally:
        libc.munmap(first, whole)


def mapped_file(address: int) -> tuple[int, int] | None:
    """Return where the file begins and ends that is mapped at the address, for this process alone.

    None if there is none, or the system does not report it.
    """
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
        span, access, _, _, inode, *_ = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return (begin, end) if access.endswith("p") and inode != "0" else None
    return None


def suit_heap(unmanaged_peak_bytes: int) -> bool:
    """Tune glibc's heap for a step, and return whether freed blocks go back to the system at once.

    They do if memory is scarce for such a step; otherwise the free end of the heap is kept. The setting is for the
    whole process, and once scarce stays scarce.
    """
    global _is_scarce  # noqa: PLW0603 - of the process, as the C library's thresholds are
    _is_scarce = _is_scarce or available_bytes() < SCARCE * unmanaged_peak_bytes
    if _is_scarce:
        return return_freed_blocks()
    _set_thresholds(MOST_MAPPED_FROM_BYTES, MOST_KEPT_BYTES)
    return False


def give_back() -> None:
    """Return all free heap memory to the system."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def return_freed_blocks() -> bool:
    """Make glibc return large freed blocks at once; return whether it can.

    The setting is for the whole process.
    """
    return _set_thresholds(MAPPED_FROM_BYTES, MAPPED_FROM_BYTES)


def _set_thresholds(mapped_from_bytes: int, trimmed_from_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, trimmed_from_bytes))


def available_bytes() -> int:
    """Return the bytes that this process can still allocate.

    This is the least of free RAM, its address-space limit and the limits of its control groups.
    """
    limits = [_status(Path("/proc/meminfo"), "MemAvailable")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - _status(Path("/proc/self/status"), "VmSize"))
    with contextlib.suppress(OSError):  # no control groups
        for line in _GROUPS_OF_PROCESS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _GROUP_FILES:
                limits += _left_in(_GROUPS / controllers, path.lstrip("/"), *_GROUP_FILES[controllers])
    return min(limits)


def _left_in(root: Path, path: str, limit: str, current: str, droppable: tuple[str, ...]) -> Iterator[int]:
    """Yield the bytes left in the control group `path` and in its parents, if they have limits.

    File pages count as free: the kernel drops them when a limit is reached, as in MemAvailable.
    """
    for group in (root / path, *(root / path).parents):
        if not group.is_relative_to(root):
            return
        with contextlib.suppress(OSError, ValueError):  # not seen from a container, or no limit ("max")
            taken = int((group / current).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield int((group / limit).read_text()) - taken + min(taken, sum(int(stat.get(key, 0)) for key in droppable))


def _status(path: Path, key: str) -> int:
    """Return a `key: N kB` line of a /proc file, in bytes.

    Without such a file or line, return more than any machine has.
    """
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
    except (OSError, StopIteration):
        return 2**62
    return int(line.split()[1]) * 1024
