"""Capture a step on the CPU as it would run on a given CUDA GPU.

The captured step has the ops that CUDA runs, with the workspaces that they need there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from overspill.capture.fake_cuda.autocast import cuda_autocast
from overspill.capture.fake_cuda.retarget import GRAPHED, retargeted
from overspill.core import Device
from overspill.costs import capability_of


@contextmanager
def captured_for(device: Device) -> Iterator[None]:
    """Capture the steps inside the block as they run on `device`.

    Does nothing unless `device` is a CUDA GPU whose compute capability is known.
    """
    capability = device.compute_capability
    if device.kind != "cuda" or not capability:
        yield
        return
    with retargeted(capability_of(capability), GRAPHED), cuda_autocast():
        yield
