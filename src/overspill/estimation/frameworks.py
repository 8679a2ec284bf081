"""Estimates of jobs of other frameworks. Other packages read and record them."""

from __future__ import annotations

from collections.abc import Callable

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.core.registry import Registry
from overspill.job.source import Source

from .api import Setting, traced
from .estimate import Estimate

# From a job, an optimizer's name (None: inference) and a device to what is recorded at a batch size.
Reader = Callable[[Source, str | None, Device], Callable[[int], Recording]]
FRAMEWORKS: Registry[Reader] = Registry("framework", "frameworks", {}, papers=("mxnet", "tensorflow", "onnx"))


def of_source(source: Source, batch: int, optimizer: str | None, setting: Setting) -> Estimate:
    """Return the estimate of `source` at a batch size, or of its inference without an optimizer.

    Raises RequestError for errors in the file or its inputs, UnsupportedError for unknown operators.
    """
    record = FRAMEWORKS.named(source.framework)(source, optimizer, setting.device)

    # There is one recording, the same each time.
    def recorded(size: int | None, iterations: int | None) -> Recording:  # noqa: ARG001
        return record(size or batch)

    return traced(recorded, source.target, batch, setting, framework=source.framework)
