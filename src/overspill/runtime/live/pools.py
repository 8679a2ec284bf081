"""Which live pool a placement asks for, where there can be one, and who leads it."""

from __future__ import annotations

import torch

from overspill.core.errors import RequestError
from overspill.placement.packing import solver_named

from .allocator import LiveAllocator, serving
from .need import LIVE_PLACEMENTS, PLANNED, TWO_ENDED, VIRTUAL, chunk_bytes
from .planned_steps import PlannedSteps
from .steps import LiveSteps
from .two_ended_steps import TwoEndedSteps

_LEADING: dict[int, str] = {}
"""By the identity of an allocator that serves PyTorch for good, the placement that it was made for."""
FIRST_MAIN_BYTES = 1 << 20
"""Of a pool with two ends before its first plan, which makes it anew."""


def check_live(placement: str | None, backend: str, where: torch.device) -> bool:
    """Whether `placement` is one with real addresses by an allocator of ours there. Raises RequestError for what cannot work."""
    if placement not in LIVE_PLACEMENTS:
        return False
    if backend == "inductor":
        if placement == PLANNED:  # the program's own arena
            return False
        if where.type == "cuda":
            raise RequestError(
                f"placement={placement!r} with backend='inductor' is for the CPU; on CUDA take backend='eager', or placement='planned'"
            )
    if where.type not in ("cpu", "cuda"):
        raise RequestError(f"placement={placement!r} is for the CPU and CUDA, not for {where.type}")
    return True


def live_steps(
    placement: str, where: torch.device, budget_bytes: int | None = None, *, restarts: bool = False
) -> LiveSteps:
    """The steps of a pool for `placement` there; on CUDA it gives PyTorch all its memory, for good.

    `budget_bytes` is the budget, if it is a size; `restarts` is that of TwoEndedSteps. Raises RequestError where PyTorch has
    begun to use the GPU, unless a pool of ours for the same placement serves it.
    """
    device = "host" if where.type == "cpu" else where.type
    allocator = _allocator(placement, device, where.index or 0, budget_bytes)
    if placement == PLANNED:
        return PlannedSteps(allocator, solver_named())
    if placement == TWO_ENDED:
        return TwoEndedSteps(allocator, restarts=restarts)
    return LiveSteps(allocator)


def _allocator(placement: str, device: str, index: int, budget_bytes: int | None) -> LiveAllocator:
    if device == "cuda" and (found := serving()) is not None:
        if (other := _LEADING.get(id(found), placement)) != placement:
            raise RequestError(
                f"PyTorch has its memory from the pool of placement={other!r} in this process, for good; {placement!r} needs another process"
            )
        return found
    if placement == TWO_ENDED:
        allocator = LiveAllocator(device, TWO_ENDED, index=index, main_bytes=FIRST_MAIN_BYTES)
    elif placement == VIRTUAL or device == "host":  # until addresses are planned, chunks fit into any budget
        chunk = chunk_bytes(budget_bytes if device == "host" else None)  # on CUDA as the simulation has it
        allocator = LiveAllocator(device, VIRTUAL, index=index, chunk_bytes=chunk)
    else:
        allocator = LiveAllocator(device, index=index)
    if device == "cuda":
        allocator.serve_pytorch()
        _LEADING[id(allocator)] = placement
    return allocator
