"""Streams, events and memory of the accelerator, for all of the runtime: what another kind of device needs is here alone.

By `torch.accelerator` where it has them (2.11 to 2.14), else by the device's own module, which ROCm calls `torch.cuda` too.
Nothing but CUDA has been thought through: that another device works is not claimed.

Names private to PyTorch that this file relies on (2.11 to 2.14): `torch._C._cuda_getCurrentRawStream`,
`torch._C._cuda_isHistoryEnabled`, and of torch.cuda.memory `_record_memory_history`, `_snapshot`, `_get_memory_metadata` and
`_set_memory_metadata`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
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

    def compute(self) -> Stream:
        """The stream on which ops of this thread run now."""
        return current_stream(torch.device("cuda", self.index))

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


# -- when work was done

FAR_SECONDS = 2.0
"""Times that lie further apart than this are told from another mark: PyTorch gives them as milliseconds in single precision."""


class DeviceClock:
    """When the streams of a device had done what stands before a mark, in seconds that `now` gives on the host.

    A mark is an event with a time, which costs the host a call and makes nobody wait. Only here the host waits, once: until
    the device has nothing to do, and both clocks can begin together.
    """

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self._device = device
        self._free: list[Any] = []
        self._raw = raw_streams(device)
        self._streams: dict[int, Stream] = {}
        synchronize(device)
        self._origin = self.mark()
        self._origin_seconds = now()
        self._next: tuple[Any, float] | None = None

    def mark(self, stream: Any = None) -> Any:
        """An event behind all that `stream`, or else the one that computes, has been given."""
        event = self._free.pop() if self._free else torch.get_device_module(self._device).Event(enable_timing=True)
        event.record(self._compute() if stream is None else stream)
        return event

    def _compute(self) -> Stream:
        """The stream that computes, whose object takes the host longer to make than an event to record."""
        raw = None if self._raw is None else self._raw.current(self._raw.index)
        if raw is None:
            return current_stream(self._device)
        if raw not in self._streams:
            self._streams[raw] = current_stream(self._device)
        return self._streams[raw]

    def is_past(self, mark: Any) -> bool:
        """Whether what stands before it is done."""
        return bool(mark.query())

    def seconds(self, mark: Any) -> float:
        """When that was. Only for what is past."""
        since = self._origin.elapsed_time(mark) / 1e3
        if since > FAR_SECONDS:
            self._next = mark, self._origin_seconds + since
        return float(self._origin_seconds + since)

    def give_back(self, mark: Any) -> None:
        """Nobody asks for this one any more: it can be recorded anew."""
        if self._next is not None and self._next[0] is mark:
            self._free.append(self._origin)
            self._origin, self._origin_seconds = self._next
            self._next = None
        else:
            self._free.append(mark)

    def settle(self) -> None:
        """Wait until all marks are past."""
        synchronize(self._device)


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


MOST_HISTORY = 200_000
"""So many events of the allocator are kept, of some KB each: those that came last."""


class MemoryHistory:
    """What PyTorch's own recorder sees of memory from now on, as the snapshot that is `taken` at the end.

    A recorder that is on already goes on as it is. Raises RuntimeError for an allocator that is not PyTorch's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = not torch._C._cuda_isHistoryEnabled()
        self._said_before = torch.cuda.memory._get_memory_metadata()
        self._steps: list[dict[str, Any]] = []
        if self._is_ours:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MOST_HISTORY, clear_history=True
            )

    def annotate(self, text: str) -> None:
        """What is allocated from now on says `text`."""
        torch.cuda.memory._set_memory_metadata(text)

    def step(self, name: str, stage: str) -> None:
        """The step of this name is at its `START`, or at its `END`."""
        at = time.time_ns() // 1000  # as PyTorch says it of allocations
        self._steps.append({"stage": stage, "name": name, "device": self._device.index or 0, "time_us": at})

    def taken(self) -> dict[str, Any]:
        """The snapshot, as `torch.cuda.memory._dump_snapshot` would write it, with the steps among its annotations."""
        found: dict[str, Any] = torch.cuda.memory._snapshot()
        torch.cuda.memory._set_memory_metadata(self._said_before)
        if self._is_ours:
            torch.cuda.memory._record_memory_history(None)
        annotations = [*found.get("external_annotations", ()), *self._steps]
        found["external_annotations"] = sorted(annotations, key=itemgetter("time_us"))
        return found


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
