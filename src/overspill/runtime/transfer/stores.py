"""Stores for offloaded bytes: a file on disk, host memory, or pinned memory.

A store allocates slots of one arena and reuses freed ones, so that after the first step it neither grows nor fragments
further. Reads and writes run on a lane, never on the compute thread (except to enqueue them, for CUDA).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar

import torch
from torch import Tensor, UntypedStorage

from overspill.core import Tiers, Verb
from overspill.core.errors import RequestError, StoreError
from overspill.core.units import format_bytes
from overspill.plans.plan import Plan
from overspill.pytorch.storages import storage_over
from overspill.runtime.accelerator import DeviceStream, PageLock, raw_streams

from . import host_memory
from ._copies import can_copy
from .forks import tell_of_forks
from .lanes import CopyLane, HeldSlot, Lane, Slot, StreamLane, ThreadLane, bytes_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for a full disk, a used-up quota, or a file of the largest possible size."""
PAGE_BYTES = 4096
MOST_PIECES = 1024
"""The most pieces of memory that one system call reads or writes (IOV_MAX of Linux)."""


class Store(ABC):
    """Base of all stores.

    Free slots of equal (page-rounded) size are reused; the arena grows only when none is free. Finalizers release slots
    too, and may run in the middle of anything, even `allocate`. So `release` takes no lock: released slots go to a
    queue, which the next `allocate` empties.
    """

    name: ClassVar[str] = ""
    """Its name for users."""
    device_type: ClassVar[str] = "cpu"
    """The device type whose tensors it holds."""
    takes_directory: ClassVar[bool] = False
    """Whether its constructor takes a directory for its file."""
    stays: ClassVar[bool] = True
    """Whether the memory of a slot is always the same."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._returned: deque[Slot] = deque()
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self._tails: list[tuple[int, int]] = []  # per chunk: (first unused byte, size)
        self._used_bytes = 0
        self.peak_bytes = 0
        self.is_forked = False
        """Whether this process is a child of the one that made the store."""
        tell_of_forks(self)

    def forked(self) -> None:
        """Reset the lock in a forked child."""
        self._lock = RLock()
        self.is_forked = True

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use."""
        with self._lock:
            self._take_back()
            return self._used_bytes

    def _take_back(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._used_bytes -= slot.nbytes
            self._free[slot.nbytes].append(slot)

    def lanes(self, device: torch.device) -> tuple[Lane, Lane]:  # noqa: ARG002 - of the streams of some devices
        """Return one lane each way for transfers from and to `device`."""
        return (  # `write` and `read` as they are when a copy runs
            ThreadLane("offload", lambda slot, source: self.write(slot, source)),  # noqa: PLW0108
            ThreadLane("prefetch", lambda slot, target: self.fetch(slot, target)),  # noqa: PLW0108
        )

    def hold(self, tensor: Tensor) -> Slot:
        """Return a slot for a dense `tensor` in host memory, whose bytes are read from where they are.

        Raises StoreError where the store must copy them, and they do not fit.
        """
        return HeldSlot.of(tensor)

    @abstractmethod
    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Return the memory of a slot on the host, to be read and written there as long as the slot is used."""

    @contextlib.contextmanager
    def lent(self, slot: Slot, nbytes: int, *, writes: bool) -> Iterator[UntypedStorage]:  # noqa: ARG002 - of some
        """Let the host read the memory of a slot, and change it if it `writes`. Raises StoreError."""
        yield self.memory(slot, nbytes)

    @abstractmethod
    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Return the bytes of a slot where they are, as memory of the host, `[nbytes]` of uint8.

        The tensor holds `keep` as long as its memory is used: the handle, for another tensor may get the slot after it.
        """

    def let_go(self) -> None:  # noqa: B027 - a thread's copies hold their tensors themselves
        """Free the tensors that were held and have left."""

    def fetch(self, slot: Slot, target: Tensor) -> None:
        """Fill `target` (uint8, one dimension) from a slot of the store, or from where a tensor is held."""
        if isinstance(slot, HeldSlot):
            ctypes.memmove(target.data_ptr(), slot.memory.data_ptr(), target.numel())
        else:
            self.read(slot, target)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole arena."""
        return sum(size for _, size in self._tails)

    def reserve(self, nbytes: int, tiers: Tiers | None = None) -> None:  # noqa: ARG002 - of stores on a disk
        """Grow the arena to `nbytes` in all, for a plan with `tiers`. Raises StoreError if they do not fit."""
        with self._lock:
            if (missing := nbytes - self.capacity_bytes) > 0:
                self._add_chunk(missing)

    def allocate(self, nbytes: int) -> Slot:
        """Return a slot for `nbytes` bytes. Raises StoreError if they do not fit."""
        rounded = max(PAGE_BYTES, whole_pages(nbytes))
        with self._lock:
            self._take_back()
            slot = self._find(rounded)
            self._used_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            return slot

    def _find(self, nbytes: int) -> Slot:
        if slots := self._free[nbytes]:
            return slots.pop()
        chunk = next((i for i, (used, size) in enumerate(self._tails) if used + nbytes <= size), None)
        if chunk is None:
            self._add_chunk(nbytes)
            chunk = len(self._tails) - 1
        used, size = self._tails[chunk]
        self._tails[chunk] = (used + nbytes, size)
        return Slot(chunk, used, nbytes)

    def to_disk(self, slot: Slot) -> None:  # noqa: B027 - most have none
        """Let `slot` go on to the disk below, if the store has one: its next use is far."""

    def from_disk(self, slot: Slot) -> None:  # noqa: B027 - most have none
        """Bring `slot` back from the disk below, if it is there: its next use is near."""

    def expect(self, updates: int) -> None:  # noqa: B027 - most have space
        """Note so many more updates on the host to come, which give memory back."""

    def release(self, slot: Slot) -> None:
        """Free `slot`; safe to call anywhere, because it never waits."""
        if not isinstance(slot, HeldSlot):
            self._returned.append(slot)

    def _add_chunk(self, nbytes: int) -> None:
        nbytes = whole_pages(nbytes)
        self._grow(nbytes)
        self._tails.append((0, nbytes))

    @abstractmethod
    def _grow(self, nbytes: int) -> None:
        """Add a chunk of `nbytes`, or raise StoreError and change nothing."""

    @abstractmethod
    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy `source` (uint8, one dimension) into `slot`."""

    @abstractmethod
    def read(self, slot: Slot, target: Tensor) -> None:
        """Fill `target` (uint8, one dimension) from `slot`."""

    @abstractmethod
    def close(self) -> None:
        """Return everything to the system."""


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


class HostStore(Store):
    """Pageable host memory, outside the budget of the device."""

    name = "host"
    _advice = "use --store disk, or a larger budget"

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[Tensor] = []

    def _grow(self, nbytes: int) -> None:
        try:
            self._chunks.append(self._allocate_chunk(nbytes))
        except (OSError, RuntimeError):
            raise StoreError(
                f"the host store needs {format_bytes(nbytes)} more of host memory, and the system refused; "
                f"{self._advice}"
            ) from None

    def _allocate_chunk(self, nbytes: int) -> Tensor:
        return self._new_pages(nbytes)

    def _new_pages(self, nbytes: int) -> Tensor:
        return host_memory.whole_pages(nbytes)

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy into the arena, releasing the interpreter lock."""
        ctypes.memmove(self._chunks[slot.chunk].data_ptr() + slot.offset, source.data_ptr(), source.numel())

    def read(self, slot: Slot, target: Tensor) -> None:
        """Copy out of the arena, releasing the interpreter lock."""
        ctypes.memmove(target.data_ptr(), self._chunks[slot.chunk].data_ptr() + slot.offset, target.numel())

    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Return the slot's part of the arena, as a storage of its own."""
        if isinstance(slot, HeldSlot):
            address = slot.tensor.data_ptr()
        else:
            address = self._chunks[slot.chunk].data_ptr() + slot.offset
        return storage_over(address, torch.device("cpu"), nbytes)

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Return the slot's part of the arena, as a storage of its own."""
        if isinstance(slot, HeldSlot):
            return slot.memory
        chunk = self._chunks[slot.chunk]
        kind: Any = type("Shown", (ctypes.c_uint8 * nbytes,), {})
        memory = kind.from_address(chunk.data_ptr() + slot.offset)
        memory.keep = chunk, keep
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Free the arena."""
        self._chunks.clear()


class PinnedStore(HostStore):
    """Page-locked host memory for CUDA, with copies that do not block.

    The arena is ordinary memory locked for the device. The pinned allocator of torch would round each block up to a
    power of two. `pages` is a PageLock, or a stand-in in tests.
    """

    name = "pinned"
    device_type = "cuda"
    _advice = "a larger budget offloads less; `ulimit -l` may forbid to lock so much"

    def __init__(self, pages: PageLock | None = None) -> None:
        super().__init__()
        self._pages = pages or PageLock()
        self._addresses: list[int] = []
        self._streams: list[DeviceStream] = []
        self._held = HeldPages(self._pages)
        self._left: deque[HeldSlot] = deque()
        self._end = weakref.finalize(self, _unlock, self._chunks, self._held, self._streams, os.getpid())

    def _allocate_chunk(self, nbytes: int) -> Tensor:
        chunk = super()._allocate_chunk(nbytes)
        if (status := self._pages.lock(chunk)) != 0:
            raise RuntimeError(f"host memory could not be locked: error {status}")
        self._addresses.append(chunk.data_ptr())
        return chunk

    def lanes(self, device: torch.device) -> tuple[Lane, Lane]:
        """Return two streams of `device`, one each way."""
        lanes: tuple[CopyLane | StreamLane, CopyLane | StreamLane]
        if (streams := raw_streams(device)) is not None and can_copy(streams.path, streams.prefix):
            lanes = CopyLane(streams, self._address, outward=True), CopyLane(streams, self._address, outward=False)
        else:
            lanes = StreamLane(device, self.write), StreamLane(device, self.read)
        self._streams += [lane.stream for lane in lanes]
        return lanes

    def hold(self, tensor: Tensor) -> Slot:
        """Lock the pages of `tensor` where they are, or copy it if the system refuses."""
        if tensor.nbytes and self._held.lock(tensor):
            return HeldSlot.of(tensor)
        slot = self.allocate(tensor.nbytes)
        self._part(slot, tensor.nbytes).copy_(HeldSlot.of(tensor).memory)
        return slot

    def release(self, slot: Slot) -> None:
        """Free `slot`; a tensor that is held stays, because a copy of it may be under way."""
        if isinstance(slot, HeldSlot):
            self._left.append(slot)
        super().release(slot)

    def let_go(self) -> None:
        """Wait for the copies of held tensors that have left, and free these."""
        if self._left:
            for stream in self._streams:
                stream.synchronize()
            while self._left:
                self._held.unlock(self._left.popleft().tensor)

    def _address(self, slot: Slot) -> int:
        if isinstance(slot, HeldSlot):
            return slot.memory.data_ptr()
        return self._addresses[slot.chunk] + slot.offset

    def write(self, slot: Slot, source: Tensor) -> None:
        """Enqueue the copy to the host on the current stream."""
        self._part(slot, source.numel()).copy_(source, non_blocking=True)

    def read(self, slot: Slot, target: Tensor) -> None:
        """Enqueue the copy to the device on the current stream."""
        target.copy_(self._part(slot, target.numel()), non_blocking=True)

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Wait for copies under way, and return the slot's part of the arena."""
        for stream in self._streams:
            stream.synchronize()
        return super().shown(slot, nbytes, keep)

    def _part(self, slot: Slot, nbytes: int) -> Tensor:
        if isinstance(slot, HeldSlot):
            return slot.memory
        return self._chunks[slot.chunk][slot.offset : slot.offset + nbytes]

    def close(self) -> None:
        """Unlock and free the arena."""
        self._left.clear()
        self._end()


class HeldPages:
    """Page locks of tensors that are held where they are.

    Tensors of one storage are locked together, and so are all of a file that is mapped: their pages overlap.
    """

    def __init__(self, pages: PageLock) -> None:
        self.pages = pages
        self._locked: dict[int, list[Tensor]] = {}
        """By the first address that is locked: that memory, and the tensors in it."""

    def lock(self, tensor: Tensor) -> bool:
        """Lock the pages of `tensor`, and of what they are locked with; return whether they are."""
        memory = self._memory_of(tensor)
        if (found := self._locked.get(memory.data_ptr())) is None:
            # Memory that PyTorch did not allocate may be a file, whose pages would be copied to be written.
            if self.pages.lock(memory, read_only=not tensor.untyped_storage().resizable()) != 0:
                return False
            found = self._locked[memory.data_ptr()] = [memory]
        found.append(tensor)
        return True

    def unlock(self, tensor: Tensor) -> None:
        """Unlock the pages of `tensor` if no other tensor that is held has them."""
        memory = self._memory_of(tensor)
        if (found := self._locked.get(memory.data_ptr())) is not None:
            found[1:] = [other for other in found[1:] if other is not tensor]
            if len(found) == 1:
                self.pages.unlock(self._locked.pop(memory.data_ptr())[0])

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """Return the memory that is locked with `tensor`: its storage, or the file that is mapped there."""
        storage = tensor.untyped_storage()
        if storage.resizable():
            return bytes_of(storage)
        known = (memory for memory, *_ in self._locked.values())
        at = storage.data_ptr()
        if (found := next((m for m in known if 0 <= at - m.data_ptr() < m.nbytes), None)) is not None:
            return found
        if (span := host_memory.mapped_file(at)) is None:
            return bytes_of(storage)
        return bytes_of(storage_over(span[0], storage.device, span[1] - span[0]))

    def clear(self) -> None:
        """Unlock all."""
        for memory, *_ in self._locked.values():
            self.pages.unlock(memory)
        self._locked.clear()


def _unlock(chunks: list[Tensor], held: HeldPages, streams: list[DeviceStream], process: int) -> None:
    """Unlock and free the arena of a pinned store, and the tensors that it holds."""
    try:
        if process == os.getpid():  # a forked child has no device
            with contextlib.suppress(RuntimeError):  # of a device that has failed: nothing is under way on it any more
                for stream in streams:  # of an engine that was dropped, copies may be under way
                    stream.synchronize()
            for chunk in chunks:
                held.pages.unlock(chunk)
            held.clear()
    finally:
        chunks.clear()
        streams.clear()


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to pages, as slots and chunks are."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def store_bytes(plan: Plan) -> int:
    """Return the store bytes that one step of `plan` needs, each tensor rounded up to pages."""
    moved = plan.schedule.targets(Verb.OFFLOAD) + plan.schedule.targets(Verb.PREFETCH)
    stored = dict.fromkeys((*plan.schedule.stored, *moved))
    return sum(whole_pages(plan.graph.tensors[t].nbytes) for t in stored)


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


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a one-dimensional uint8 CPU tensor, without a copy."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
