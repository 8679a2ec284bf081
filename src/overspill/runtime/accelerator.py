"""Streams, events and memory of the accelerator, for all of the runtime: what another kind of device needs is here alone.

By `torch.accelerator` where it has them (2.11 to 2.13), else by the device's own module, which ROCm calls `torch.cuda` too.
Nothing but CUDA has been thought through: that another device works is not claimed.

Names private to PyTorch that this file relies on: `torch._C._cuda_getCurrentRawStream`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

KINDS = ("cuda",)
"""The types of devices that training under a budget knows, besides the CPU."""


def is_available() -> bool:
    """Whether PyTorch has an accelerator of a known kind here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type in KINDS


# -- streams and events


class Stream(Protocol):
    """What is used of `torch.Stream`; as a context manager it is the current one."""

    def wait_stream(self, other: Any) -> None:
        """Let what follows run behind all that `other` has been given."""

    def wait_event(self, event: Any) -> None:
        """Let what follows run behind `event`."""

    def record_event(self) -> Any:
        """An event behind all that this stream has been given."""

    def synchronize(self) -> None:
        """Wait until it is idle."""

    def __enter__(self) -> Any:
        """Be the current stream."""

    def __exit__(self, *_: object) -> Any:
        """Let the one before be the current stream again."""


def new_stream(device: torch.device) -> Stream:
    """A stream of `device` beside those that compute."""
    made: Stream = torch.get_device_module(device).Stream(device)
    return made


def current_stream(device: torch.device) -> Stream:
    """The stream on which ops of this thread run now."""
    found: Stream = torch.get_device_module(device).current_stream(device)
    return found


def synchronize(device: torch.device) -> None:
    """Wait until `device` has nothing to do."""
    torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class RawStreams:
    """The streams of device number `index` as its runtime library knows them, for native code.

    `prefix` is what the library's functions begin with, and `path` where it lies, if it is not the one that PyTorch has
    loaded. `current(index)` is the stream on which ops of this thread run now.
    """

    prefix: str
    index: int
    current: Callable[[int], int]
    path: str = ""

    def new(self) -> tuple[Stream, int]:
        """A stream beside those that compute, which lives as long as the object does, and its raw handle."""
        stream: Any = new_stream(torch.device("cuda", self.index))
        return stream, int(stream.cuda_stream)


def raw_streams(device: torch.device) -> RawStreams | None:
    """The raw streams of `device`; None where it has none that we know of."""
    current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if device.type != "cuda" or current is None:
        return None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return RawStreams("hip" if torch.version.hip else "cuda", index, current)


# -- memory


def memory_info(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on `device`, and that it has."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def reserved_bytes(device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds of `device`."""
    return int(torch.get_device_module(device).memory_reserved(device))


def reset_peaks(device: torch.device) -> None:
    """Let `peak_bytes` begin anew."""
    torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that tensors had, and that PyTorch's allocator held, since `reset_peaks`."""
    return int(torch.accelerator.max_memory_allocated(device)), int(torch.accelerator.max_memory_reserved(device))


def name_and_bytes(device: torch.device) -> tuple[str, int]:
    """What the driver calls `device`, and the bytes that it has in all."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


# -- host memory that copies run beside compute from


class PageLock:
    """Locks pages of host memory for the accelerator, and unlocks them."""

    def lock(self, chunk: Tensor) -> int:
        """0, or the number of the device's error, which is then its last error no more."""
        status = int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.nbytes, 0))
        if status != 0:
            self.clear_error()
        return status

    def unlock(self, chunk: Tensor) -> None:
        """Let go of pages that no copy reads or fills any more."""
        torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())

    def clear_error(self) -> None:
        """A refusal stays the device's last error, and the next op would raise it: let an op of ours be that."""
        try:
            torch.ones((), device="cuda")
        except RuntimeError:
            return
