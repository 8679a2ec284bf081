"""A stand-in for a device's streams and events with times: work takes what it is said to take, beside a host with a clock of its own."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overspill.runtime import accelerator

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """A queue that is busy until some time."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.busy_until = 0.0

    def work(self, seconds: float) -> None:
        """What is given to it takes so long, once it has come to it."""
        self.busy_until = max(self.busy_until, self.device.now) + seconds

    def wait_stream(self, other: FakeStream) -> None:
        self.busy_until = max(self.busy_until, other.busy_until)


class FakeEvent:
    """An event with a time; its times are milliseconds in single precision, as PyTorch's are."""

    def __init__(self, device: FakeDevice, *, enable_timing: bool) -> None:
        assert enable_timing
        self.device = device
        device.made += 1

    def record(self, stream: FakeStream) -> None:
        self.at = max(stream.busy_until, self.device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query()
        assert other.query()
        (single,) = struct.unpack("f", struct.pack("f", 1000 * (other.at - self.at)))
        return float(single)


class FakeDevice:
    """The host's clock is at `now`; `made` events were made, and the host waited for the device `waits` times."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.made = self.waits = 0
        self.compute, self.copies = FakeStream(self), FakeStream(self)
        event: Any = lambda **kwargs: FakeEvent(self, **kwargs)  # noqa: E731
        patch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=event))
        patch.setattr(accelerator, "current_stream", lambda _: self.compute)
        patch.setattr(accelerator, "raw_streams", lambda _: None)
        patch.setattr(accelerator, "synchronize", lambda _: self._wait())

    def _wait(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.compute.busy_until, self.copies.busy_until)
