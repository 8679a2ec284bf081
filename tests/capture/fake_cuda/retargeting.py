"""What tests of the retarget table share: recordings of small programs, and which row a test is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase
from overspill.costs.scratch import Scratch, Software, scratch_bytes

aten = torch.ops.aten
F = torch.nn.functional
TESTED: set[Any] = set()
HALF = torch.float16


def row(*ops: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as that of these rows."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(ops)
        return test

    return mark


def run(program: Callable[[], Any], capability: tuple[int, int] = (8, 0)) -> Recording:
    return record(lambda _: program(), capability=capability)


def names(recording: Recording, phase: Phase | None = None) -> list[str]:
    views = {
        "view",
        "expand",
        "t",
        "transpose",
        "slice",
        "detach",
        "unsqueeze",
        "squeeze",
        "select",
        "_unsafe_view",
        "alias",
    }
    return [op.name for op in recording.ops if op.name not in views and phase in {None, op.phase}]


def scratches(recording: Recording) -> list[Scratch]:
    return [a.scratch for a in recording.allocations if a.scratch is not None and a.scratch.family != "gemm_handle"]


def taken(recording: Recording, capability: str = "8.0") -> list[int]:
    """The likely bytes of each scratch, in order."""
    return [scratch_bytes(s, capability, Software()).central for s in scratches(recording)]


def cuda(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_(grad)


def live_after(forward: Callable[[], Any]) -> int:
    """Bytes that a forward pass leaves: its result and what it keeps for backward."""
    seen = []

    def program(recorder: Recorder) -> None:
        before = recorder.live_bytes
        kept = forward()
        seen.append(recorder.live_bytes - before)
        del kept

    record(program)
    return seen[0]
