"""Bytes that gloo's collectives allocate while they run, apart from their arguments and results.

Measured by PyTorch's allocator on the CPU (2.13, two and four ranks, 1 MiB given).
"""

from __future__ import annotations

GLOO_THREADS = 2
"""Collectives that gloo runs at a time; others wait (`torch.distributed` makes two threads for each network device)."""


def gloo_bytes(collective: str, given_bytes: int, ranks: int) -> int:
    """Return the bytes that a collective takes on each of `ranks` ranks, by its name in torch.distributed.

    A gather takes its result once more, a scatter its input.
    """
    if collective.startswith("all_gather"):
        return given_bytes * ranks
    return given_bytes if collective.startswith("reduce_scatter") else 0
