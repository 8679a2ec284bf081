"""Streams, events and memory of the accelerator; other device kinds go here.

These come from `torch.accelerator` if it has them, otherwise from the device's own module, which ROCm also calls
`torch.cuda`.

Known limit: only CUDA is considered. No other device is claimed to work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from overspill.pytorch import cuda

KINDS = ("cuda",)
"""Device types other than the CPU that can train within a budget."""


def is_available() -> bool:
    """Return whether PyTorch has an accelerator of a known kind on this machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type in KINDS


# -- streams and events


class DeviceStream(Protocol):
    """The used part of `torch.Stream`. As a context manager it becomes the current stream."""

    def wait_stream(self, other: Any) -> None:
        """Make later work run after all work given to `other`."""

    def wait_event(self, event: Any) -> None:
        """Make later work run after `event`."""

    def record_event(self) -> Any:
        """Return an event after all work given to this stream."""

    def synchronize(self) -> None:
        """Wait until the stream is idle."""

    def __enter__(self) -> Any:
        """Become the current stream."""

    def __exit__(self, *_: object) -> Any:
        """Restore the previous current stream."""


def new_stream(device: torch.device) -> DeviceStream:
    """Return a new stream of `device`, concurrent with compute."""
    made: DeviceStream = torch.get_device_module(device).Stream(device)
    return made


def current_stream(device: torch.device) -> DeviceStream:
    """Return the current stream of this thread on `device`."""
    found: DeviceStream = torch.get_device_module(device).current_stream(device)
    return found


def synchronize(device: torch.device) -> None:
    """Wait until `device` is idle."""
    torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class RawStreams:
    """Streams of a device as its runtime library has them, for native code."""

    prefix: str
    """First part of the names of the library's functions."""
    index: int
    """Number of the device."""
    current: Callable[[int], int]
    """Returns the current raw stream of this thread, given the number of the device."""
    path: str = ""
    """File of the library, if it is not the one that PyTorch has loaded."""

    def compute(self) -> DeviceStream:
        """Return the current stream of this thread."""
        return current_stream(torch.device("cuda", self.index))

    def new(self) -> tuple[DeviceStream, int]:
        """Return a new stream, alive as long as the object, and its raw handle."""
        stream: Any = new_stream(torch.device("cuda", self.index))
        return stream, int(stream.cuda_stream)


def raw_streams(device: torch.device) -> RawStreams | None:
    """Return the raw streams of `device`, or None."""
    current = cuda.raw_stream_getter()
    if device.type != "cuda" or current is None:
        return None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return RawStreams("hip" if torch.version.hip else "cuda", index, current)


# -- when work was done

FAR_SECONDS = 2.0
"""Longest seconds measured from one mark: PyTorch returns times in milliseconds in single precision."""


class DeviceClock:
    """Tells when the streams of a device reach a mark, in seconds of the host.

    `now` returns the host's seconds. A mark is an event with a time. It costs the host a call, and makes no one wait.
    Only the constructor waits once until the device is idle, so that both clocks start together.
    """

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self._device = device
        self._free: list[Any] = []
        self._raw = raw_streams(device)
        self._streams: dict[int, DeviceStream] = {}
        synchronize(device)
        self._origin = self.mark()
        self._origin_seconds = now()
        self._next: tuple[Any, float] | None = None

    def mark(self, stream: Any = None) -> Any:
        """Return an event after all work given to `stream`, or to compute if None."""
        event = self._free.pop() if self._free else torch.get_device_module(self._device).Event(enable_timing=True)
        event.record(self._compute() if stream is None else stream)
        return event

    def _compute(self) -> DeviceStream:
        """Return the compute stream, cached because making its object costs more than an event."""
        raw = None if self._raw is None else self._raw.current(self._raw.index)
        if raw is None:
            return current_stream(self._device)
        if raw not in self._streams:
            self._streams[raw] = current_stream(self._device)
        return self._streams[raw]

    def is_past(self, mark: Any) -> bool:
        """Return whether all work before the mark is done."""
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark that has passed, in seconds."""
        since = self._origin.elapsed_time(mark) / 1e3
        if since > FAR_SECONDS:
            self._next = mark, self._origin_seconds + since
        return float(self._origin_seconds + since)

    def give_back(self, mark: Any) -> None:
        """Recycle a mark."""
        if self._next is not None and self._next[0] is mark:
            self._free.append(self._origin)
            self._origin, self._origin_seconds = self._next
            self._next = None
        else:
            self._free.append(mark)

    def settle(self) -> None:
        """Wait until all marks have passed."""
        synchronize(self._device)


# -- memory


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of `device`, and its total bytes."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch's allocator holds of `device`."""
    return int(torch.get_device_module(device).memory_reserved(device))


def empty_cache(device: torch.device) -> None:
    """Return unused memory of PyTorch's allocator to the device."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def reset_peaks(device: torch.device) -> None:
    """Reset `peak_bytes`."""
    torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """Return the peak bytes of tensors, and of PyTorch's allocator, since `reset_peaks`."""
    return int(torch.accelerator.max_memory_allocated(device)), int(torch.accelerator.max_memory_reserved(device))


def name_and_bytes(device: torch.device) -> tuple[str, int]:
    """Return the driver's name for `device`, and its total bytes."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


MOST_HISTORY = 200_000
"""Most allocator events kept, the latest ones, of some KB each."""


class MemoryHistory:
    """PyTorch's own memory recorder, whose snapshot is `taken` at the end.

    A recorder that is already on continues unchanged. Raises RuntimeError for an allocator that is not PyTorch's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = not cuda.is_history_recorded()
        self._said_before = cuda.label()
        self._steps: list[dict[str, Any]] = []
        if self._is_ours:
            cuda.record_history(MOST_HISTORY)

    def annotate(self, text: str) -> None:
        """Annotate the allocations from now on with `text`."""
        cuda.set_label(text)

    def step(self, name: str, stage: str) -> None:
        """Mark a step's `START` or `END`."""
        at = time.time_ns() // 1000  # as PyTorch says it of allocations
        self._steps.append({"stage": stage, "name": name, "device": self._device.index or 0, "time_us": at})

    def taken(self) -> dict[str, Any]:
        """Return the snapshot, in the form that `torch.cuda.memory._dump_snapshot` would write it.

        The steps are among its annotations.
        """
        found: dict[str, Any] = cuda.history()
        cuda.set_label(self._said_before)
        if self._is_ours:
            cuda.end_history()
        annotations = [*found.get("external_annotations", ()), *self._steps]
        found["external_annotations"] = sorted(annotations, key=itemgetter("time_us"))
        return found


# -- host memory that copies run beside compute from


READ_ONLY_PAGES = 8
"""`cudaHostRegisterReadOnly` of CUDA's driver_types.h."""


class PageLock:
    """Locks and unlocks pages of host memory for the accelerator."""

    def lock(self, chunk: Tensor, *, read_only: bool = False) -> int:
        """Lock a chunk, which the device may only read if `read_only`; return 0, or the error number of the device.

        The error is cleared as the device's last error.
        """
        flags = READ_ONLY_PAGES if read_only else 0
        status = int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.nbytes, flags))
        if status != 0:
            self.clear_error()
        return status

    def unlock(self, chunk: Tensor) -> None:
        """Unlock pages that no copy uses any more."""
        torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr())

    def clear_error(self) -> None:
        """Clear the device's last error with an op of Overspill.

        Otherwise the next op of the user would raise it.
        """
        try:
            torch.ones((), device="cuda")
        except RuntimeError:
            return


def repeatable_kernels() -> None:
    """Make GPU kernels deterministic as far as PyTorch can, without its extra writes to fresh memory.

    For matrix products, call it before the first one of the process.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradients are other ones each time
    torch.utils.deterministic.fill_uninitialized_memory = False
