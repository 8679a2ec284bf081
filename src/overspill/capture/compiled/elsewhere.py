"""A step that is captured here for a GPU that is not here: with the ops that CUDA runs, and what these take there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from overspill.capture.fake_cuda.autocast import cuda_autocast
from overspill.capture.fake_cuda.retarget import GRAPHED, retargeted
from overspill.core import Device
from overspill.costs import capability_of

CAPABILITY: ContextVar[str | None] = ContextVar("capability", default=None)
"""The compute capability of the GPU that a step on the CPU is captured for; None: it runs where it is captured."""


@contextmanager
def captured_for(device: Device) -> Iterator[None]:
    """Inside, steps are captured as they run on `device`, where that is a GPU whose compute capability is known."""
    capability = device.compute_capability
    if device.kind != "cuda" or not capability:
        yield
        return
    token = CAPABILITY.set(capability)
    try:
        with retargeted(capability_of(capability), GRAPHED), cuda_autocast():
            yield
    finally:
        CAPABILITY.reset(token)
