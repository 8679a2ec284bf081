"""The native copies over fake_runtime.cpp, a stand-in for the runtime library of an accelerator."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from overspill.runtime.accelerator import RawStreams
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import CopyLane, HeldSlot, Slot

COMPILER = shutil.which("c++") or shutil.which("g++")


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-in, compiled once a process."""
    assert COMPILER is not None
    path = Path(tempfile.mkdtemp(prefix="overspill-test-")) / "libfake.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", path, source], check=True)
    found = ctypes.CDLL(str(path))
    found.fake_stream.restype = ctypes.c_void_p
    found.fake_synchronize.argtypes = (ctypes.c_void_p,)
    found.fake_log.restype = ctypes.c_char_p
    return found


def log() -> list[str]:
    """What was called since this was last asked."""
    lines: list[str] = library().fake_log().decode().splitlines()
    library().fake_forget()
    return lines


class FakeStream:
    """A stream of the stand-in."""

    def __init__(self, device: int) -> None:
        self.handle = library().fake_stream(device)

    def synchronize(self) -> None:
        library().fake_synchronize(self.handle)

    def wait_stream(self, other: FakeStream) -> None:
        """The stand-in's copies wait for compute by themselves."""


class FakeStreams(RawStreams):
    """Streams of the stand-in; compute is the default stream of the device."""

    def compute(self) -> FakeStream:  # type: ignore[override]
        return FakeStream(self.index)

    def new(self) -> tuple[FakeStream, int]:  # type: ignore[override]
        stream = FakeStream(self.index)
        return stream, stream.handle


def streams(device: int = 0) -> FakeStreams:
    return FakeStreams("fake", device, lambda _: 0, library()._name)


def lanes(store: HostStore, device: int = 0) -> tuple[CopyLane, CopyLane]:
    """Lanes of `store` each way."""

    def address(slot: Slot) -> int:
        if isinstance(slot, HeldSlot):
            return slot.memory.data_ptr()
        return store._chunks[slot.chunk].data_ptr() + slot.offset

    return (CopyLane(streams(device), address, outward=True), CopyLane(streams(device), address, outward=False))


def with_native_copies() -> TransferEngine:
    """An engine whose copies come late, by native code."""
    log()
    store = HostStore()
    return TransferEngine(store, *lanes(store))
