"""Which live pool serves a placement, where it works, and who drives it."""

from __future__ import annotations

import torch

from overspill.core.errors import RequestError
from overspill.placement.simulated_device import PAGE_BYTES

from .allocator import LiveAllocator, serving
from .need import LIVE_PLACEMENTS, TWO_ENDED, VIRTUAL, chunk_bytes
from .steps import LiveSteps
from .two_ended_steps import TwoEndedSteps

_LEADING: dict[int, str] = {}
"""The placement of each allocator that serves PyTorch for good, by the allocator's id."""
FIRST_MAIN_BYTES = 1 << 20
"""Bytes of a two-ended pool's main space until its first plan resizes it."""


def check_live(placement: str | None, backend: str, where: torch.device) -> bool:
    """Whether `placement` needs a live pool on `where`. Raises RequestError for what cannot work."""
    if placement not in LIVE_PLACEMENTS:
        return False
    if backend == "inductor" and where.type == "cuda":
        raise RequestError(
            f"placement={placement!r} with backend='inductor' is for the CPU; on CUDA take backend='eager', or placement='planned'"
        )
    if where.type not in ("cpu", "cuda"):
        raise RequestError(f"placement={placement!r} is for the CPU and CUDA, not for {where.type}")
    return True


def live_steps(placement: str, where: torch.device, budget_bytes: int = 0, *, restarts: bool = False) -> LiveSteps:
    """The LiveSteps for `placement`; on CUDA its pool serves PyTorch for good.

    `budget_bytes` is the budget that a pool on the CPU is made for; `restarts` is that of TwoEndedSteps. Raises
    RequestError where PyTorch has begun to use the GPU, unless a pool of ours for the same placement serves it.
    """
    allocator = _on_host(placement, budget_bytes) if where.type == "cpu" else _on_cuda(placement, where.index or 0)
    if placement == TWO_ENDED:
        return TwoEndedSteps(allocator, restarts=restarts)
    return LiveSteps(allocator)


def _on_host(placement: str, budget_bytes: int) -> LiveAllocator:
    if placement == TWO_ENDED:
        return LiveAllocator("host", TWO_ENDED, main_bytes=FIRST_MAIN_BYTES)
    return LiveAllocator("host", VIRTUAL, chunk_bytes=chunk_bytes(budget_bytes))


def _on_cuda(placement: str, index: int) -> LiveAllocator:
    if (found := serving()) is not None:
        if (other := _LEADING.get(id(found), placement)) != placement:
            raise RequestError(
                f"PyTorch has its memory from the pool of placement={other!r} in this process, for good; {placement!r} needs another process"
            )
        return found
    allocator = LiveAllocator("cuda", placement, index=index, main_bytes=FIRST_MAIN_BYTES, chunk_bytes=PAGE_BYTES)
    allocator.serve_pytorch()
    _LEADING[id(allocator)] = placement
    return allocator
