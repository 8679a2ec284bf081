"""Offloaded bytes in a file on a disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from overspill.core.errors import RequestError, StoreError
from overspill.core.units import format_bytes

from .lanes import HeldSlot, Slot
from .stores import Store, memory_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for a full disk, a used-up quota, or a file of the largest possible size."""
MOST_PIECES = 1024
"""The most pieces of memory that one system call reads or writes (IOV_MAX of Linux)."""


class DiskStore(Store):
    """One preallocated file without a name, of mode 0600.

    No file remains, even if the process is killed.
    """

    name = "disk"
    takes_directory = True

    def __init__(self, directory: str | Path | None = None, *, direct: bool = False) -> None:
        """Create the file; `direct` reads and writes pass by the page cache, where the file system takes them."""
        super().__init__()
        self.directory = Path(directory or tempfile.gettempdir())
        try:
            self._file = _nameless_file(self.directory)
        except OSError as error:
            raise RequestError(
                f"cannot write to the store directory {self.directory}: {error.strerror}; give a writable one with "
                "--store-dir"
            ) from None
        if direct:
            with contextlib.suppress(OSError):  # a file system without them, as a tmpfs
                fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)
        self._end = weakref.finalize(self, os.close, self._file)
        self._chunk_offsets: list[int] = []

    def _grow(self, nbytes: int) -> None:
        self.check_process()
        start = self.capacity_bytes
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            # Say what is missing, where that is known.
            if error.errno in NO_ROOM:
                raise self._no_room(nbytes, error) from None
            raise StoreError(
                f"the disk store in {self.directory} cannot grow by {format_bytes(nbytes)}: {error.strerror}; "
                "name another directory with --store-dir, or use --store host"
            ) from None
        self._chunk_offsets.append(start)

    def write(self, slot: Slot, source: Tensor) -> None:
        """Write all bytes. Raises StoreError."""
        self.write_pieces(slot, [memory_of(source)])

    def read(self, slot: Slot, target: Tensor) -> None:
        """Read all bytes. Raises StoreError."""
        self.read_pieces(slot, [memory_of(target)])

    def write_pieces(self, slot: Slot, pieces: Iterable[memoryview]) -> None:
        """Write all bytes of `pieces`, one behind the other.

        The system may accept only some at a time. Raises StoreError if it accepts none.
        """
        self._move(slot, pieces, "write", "took", _write_some)

    def read_pieces(self, slot: Slot, pieces: Iterable[memoryview]) -> None:
        """Read all bytes into `pieces`. Raises StoreError if the file ends before."""
        self._move(slot, pieces, "read", "gave", os.preadv)

    def _move(
        self, slot: Slot, pieces: Iterable[memoryview], action: str, did: str, call: Callable[[int, Any, int], int]
    ) -> None:
        self.check_process()
        left = deque(pieces)
        whole = missing = sum(map(len, left))
        while missing:
            with self._explained(action, missing):
                count = call(self._file, list(islice(left, MOST_PIECES)), self._position(slot) + whole - missing)
            if count <= 0:
                raise StoreError(f"the disk store in {self.directory} {did} only {whole - missing} of {whole} bytes")
            missing -= count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Map the slot's part of the file. Raises StoreError."""
        return self.shown(slot, nbytes, None).untyped_storage()

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Map the slot's part of the file. Raises StoreError."""
        if isinstance(slot, HeldSlot):
            return slot.memory
        self.check_process()
        with self._explained("map", nbytes):
            memory = _Mapped(self._file, nbytes, offset=self._position(slot))
        memory.keep = keep
        return torch.frombuffer(memory, dtype=torch.uint8)

    def check_process(self) -> None:
        """Raise StoreError in a forked child, whose parent goes on writing to the file."""
        if self.is_forked:
            raise StoreError(
                f"the disk store in {self.directory} is the one of the process that this one was forked from, which "
                "goes on writing to it; call the step's synchronize() before the fork, or use --store host"
            )

    def _position(self, slot: Slot) -> int:
        return self._chunk_offsets[slot.chunk] + slot.offset

    @contextlib.contextmanager
    def _explained(self, action: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._no_room(nbytes, error) from error
            raise StoreError(f"the disk store in {self.directory} failed to {action}: {error.strerror}") from error

    def _no_room(self, nbytes: int, error: OSError) -> StoreError:
        """Return the error for `nbytes` that do not fit on the file system."""
        needs = f"the disk store needs {format_bytes(nbytes)} more in {self.directory}"
        instead = "or name another directory with --store-dir, or use --store host"
        try:
            system, mounted = os.fstatvfs(self._file), _mount_point(self.directory)
        except OSError:  # then why there is no room is all that can be said
            return StoreError(f"{needs}: {error.strerror}; free some space, {instead}")
        free = system.f_bavail * system.f_frsize
        missing = max(nbytes - free, 0) or nbytes
        return StoreError(
            f"{needs}, which has {format_bytes(free)} free ({error.strerror}): {missing} bytes are missing on the "
            f"file system mounted at {mounted}; free some space, {instead}"
        )

    def close(self) -> None:
        """Close the file; the system then frees its space."""
        self._end()
        self._file = -1


def _write_some(file: int, pieces: Sequence[memoryview], position: int) -> int:
    if len(pieces) == 1:
        return os.pwrite(file, pieces[0], position)
    return os.pwritev(file, pieces, position)


class _Mapped(mmap.mmap):
    """A part of the store's file in memory, with what it keeps alive."""

    keep: object


def _nameless_file(directory: Path) -> int:
    """Return the descriptor of a new unnamed file on the file system of `directory`.

    No other process can open it. Raises OSError.
    """
    with contextlib.suppress(OSError):  # a file system without such files, or no such directory, as the next line says
        return os.open(directory, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
    file, path = tempfile.mkstemp(prefix="overspill-", dir=directory)
    os.unlink(path)  # noqa: PTH108 - mkstemp gives a string
    return file


def _mount_point(directory: Path) -> Path:
    """Return the mount point of the file system that holds `directory`."""
    path = directory.resolve()
    while not path.is_mount():
        path = path.parent
    return path
