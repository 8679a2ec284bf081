"""The stand-in GPU as a program that runs on it sees it: counters, the log, memory, and failures on demand."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COUNTERS = (
    "launches", "copies", "bytes_out", "bytes_in", "events", "records", "waits", "syncs", "mallocs", "frees", "library",
)  # fmt: skip
FAILING = ("malloc", "register", "launch")
KINDS = (
    "", "launch", "copy", "set", "record", "wait", "stream_done", "event_done", "device_done", "malloc", "free", "access",
)  # fmt: skip
ENTRY = np.dtype(
    [("kind", "u4"), ("label", "u4"), ("stream", "u8"), ("first", "u8"), ("second", "u8"), ("nbytes", "u8")]
)


@functools.cache
def _library() -> ctypes.CDLL:
    """The stand-in, which must be this process's libcuda.so.1."""
    library = ctypes.CDLL("libcuda.so.1")
    library.stand_in_counter.restype = library.stand_in_event_syncs.restype = ctypes.c_uint64
    library.stand_in_log_size.restype = ctypes.c_size_t
    library.stand_in_log_entries.restype = ctypes.c_void_p
    library.stand_in_access.argtypes = (*(ctypes.c_uint64,) * 3, ctypes.c_int, ctypes.c_uint32)
    library.stand_in_fail.argtypes = (ctypes.c_int, ctypes.c_int64)
    for name in ("used", "pinned"):
        getattr(library, f"stand_in_{name}").restype = ctypes.c_size_t
    return library


def access(stream: int, address: int, nbytes: int, *, writes: bool, label: int = 0) -> None:
    """Log what a kernel that was launched on `stream` touches."""
    _library().stand_in_access(stream, address, nbytes, writes, label)


class Counts(NamedTuple):
    """How many calls there were, and how many bytes were copied from and to devices."""

    launches: int
    copies: int
    bytes_out: int
    bytes_in: int
    events: int
    records: int
    waits: int
    syncs: int
    mallocs: int
    frees: int
    library: int

    def since(self, earlier: Counts) -> Counts:
        """What came after `earlier`."""
        return Counts(*(now - then for now, then in zip(self, earlier, strict=True)))


def counts() -> Counts:
    """All counters, since the process began."""
    return Counts(*(_library().stand_in_counter(which) for which in range(len(COUNTERS))))


def log(on: bool) -> None:
    """Write down all work, from now on or no longer."""
    _library().stand_in_log(int(on))


def take_log() -> NDArray[np.void]:
    """What was written down since the last time, as rows of ENTRY."""
    count = _library().stand_in_log_size()
    if count == 0:
        return np.empty(0, dtype=ENTRY)
    raw = (ctypes.c_char * (count * ENTRY.itemsize)).from_address(_library().stand_in_log_entries())
    found = np.frombuffer(bytes(raw), dtype=ENTRY)
    _library().stand_in_log_clear()
    return found


def fail(what: str, nth: int = 1) -> None:
    """Let the `nth` call of a kind in FAILING from now on fail: once, but after a failed launch nothing works any more."""
    _library().stand_in_fail(FAILING.index(what), nth)


def hold_events(on: bool) -> None:
    """Let no event pass, until this is taken back or the host waits for a device."""
    _library().stand_in_hold_events(int(on))


def used_bytes(device: int = 0) -> int:
    """What is taken of the card now."""
    return _library().stand_in_used(device)


def pinned_bytes() -> int:
    """Host memory that is registered now."""
    return _library().stand_in_pinned()


def event_syncs() -> int:
    """How often the host waited for an event."""
    return _library().stand_in_event_syncs()
