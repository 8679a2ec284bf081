"""How the C library hands freed memory back to the system, which decides what a budget on the CPU is worth.

glibc raises its threshold for separate mappings up to 32 MiB as large blocks are freed. Blocks below it then come from
a heap that feature maps of many sizes leave full of holes: ResNet-50 under 1.2 GiB had 1.6 GB resident between steps,
and 0.6 GB with a fixed threshold (measured on glibc 2.36, torch 2.13; `tests/test_real_size.py` holds it to that).
"""

from __future__ import annotations

import ctypes
import functools

_M_MMAP_THRESHOLD = -3  # malloc.h
MAPPED_FROM_BYTES = 4 * 2**20
"""Blocks of at least this size are mapped on their own and unmapped when freed."""


@functools.cache
def return_freed_blocks() -> bool:
    """Make the C library give large freed blocks back at once, for the whole process; whether it can."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES))
