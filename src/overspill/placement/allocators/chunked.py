"""Virtual addressing: consecutive addresses over equal chunks; its rules are in native/allocators/chunked.hpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError
from overspill.placement.simulated_device import PAGE_BYTES

from .native_allocator import NativeAllocator


@dataclass(frozen=True)
class ChunkedConfig:
    """Settings of virtual addressing."""

    chunk_bytes: int = PAGE_BYTES
    """The size of a chunk, a multiple of the driver's 2 MiB; the paper takes 40 MB."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.chunk_bytes % PAGE_BYTES:
            raise RequestError(f"chunk_bytes must be a multiple of {PAGE_BYTES}, not {self.chunk_bytes}")


class ChunkedAllocator(NativeAllocator):
    """Chunks behind consecutive virtual addresses, kept when a block is freed.

    Any chunks serve any request, so it succeeds if enough of them are free or the device has more. It has no external
    fragmentation. A smaller chunk wastes less (eq. 1), a larger one is mapped in fewer calls.
    """

    name = core = "chunked"
    summary: ClassVar = "chunks of memory mapped behind consecutive addresses, no external fragmentation"
    source: ClassVar = "Out-of-core training ... with adaptive window-based scheduling, section 4"
    config_type: ClassVar = ChunkedConfig
    config: ChunkedConfig
