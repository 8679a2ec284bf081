"""Stores in host memory up to a budget, with a disk below it.

A plan says which copies go on to the disk and when they come back (`planning/tiers.py`); lowered programs call
`to_disk` and `from_disk` at these moments. What is not planned works too, only slower: a copy that is read comes back
first, and where host memory is full, the copy whose last use is longest ago makes space.

    HOST ──to_disk: a thread of the drive writes it──▶ HOST, DISK ──space is needed──▶ DISK ──from_disk──▶ HOST, DISK

Copies of host memory may be in several pieces, so that nothing is lost between those of many sizes; an update on the
host gets them mapped in a row. A copy that is on the disk is not written again before its bytes change. Threads of the
drives, and lanes that need space, wait for one another without a lock: the finalizers that release slots may run in any
of them.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

from overspill.core import Tiers
from overspill.core.errors import RequestError, StoreError
from overspill.core.units import format_bytes
from overspill.pytorch.storages import storage_over

from . import host_memory
from .disk_store import DiskStore
from .free_memory import FreeMemory, HostPiece
from .host_store import HostStore
from .lanes import CLOSED, HeldSlot, Slot, ThreadLane, Ticket
from .stores import PAGE_BYTES, memory_of, whole_pages

S = TypeVar("S", bound="TieredStore")
Directories = str | Path | Sequence[str | Path] | None
"""One directory for each drive."""
_LOOK_AGAIN_SECONDS = 0.5
"""How often a thread that waits for space looks without being told."""
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()


@dataclass
class _SlotState:
    """Where the bytes of a slot are."""

    pieces: tuple[HostPiece, ...] | None = None
    """Its host memory."""
    place: Slot | None = None
    """Its place on a drive."""
    drive: int = 0
    is_on_disk: bool = False
    """Whether the drive has its bytes as they are."""
    is_leaving: bool = False
    """Whether its next use is far, so that it makes space before others."""
    users: int = 0
    """Copies under way that need its host memory."""
    shown: int = 0
    """Tensors of the host over its place on the drive, by which anybody may write."""
    events: list[Any] = field(default_factory=list)
    """Ends of a GPU's copies from and to its host memory."""
    version: int = 0
    """How often it was written."""
    writing: Ticket | None = None
    reading: Ticket | None = None
    is_released: bool = False
    is_gone: bool = False
    """Whether all that it had has been given back."""


@dataclass(frozen=True, eq=False)
class TieredSlot(Slot):
    """A slot whose bytes are in host memory, on a drive, or both."""

    state: _SlotState = field(default_factory=_SlotState)


class TieredStore(HostStore):
    """Base of the stores with a disk below host memory.

    All changes of a slot's state are made under the store's lock. No thread waits for anything while it holds that.
    """

    takes_directory = True
    stays = False
    _advice = "give it a smaller host_budget"

    def __init__(self, directory: Directories = None, host_bytes: int | None = None) -> None:
        """Create files in each `directory`, one for a drive; None: where temporary files go. Raises RequestError."""
        super().__init__()
        self.host_budget_bytes = default_host_bytes() if host_bytes is None else host_bytes
        self._drives = [DiskStore(each, direct=True) for each in directories_of(directory)]
        this = weakref.ref(self)
        self._writers = [ThreadLane("disk-write", lambda slot, _: alive(this)._write_out(slot)) for _ in self._drives]
        self._readers = [ThreadLane("disk-read", lambda slot, _: alive(this)._read_in(slot)) for _ in self._drives]
        self._memory = FreeMemory()
        self._files: list[int] = []
        self._close_files = weakref.finalize(self, _close_all, self._files)
        self._in_memory: OrderedDict[TieredSlot, None] = OrderedDict()  # the one used last is last
        self._numbers: list[int] = []
        self._next_number = itertools.count()
        self._waiting: list[Any] = []
        self._cooling: list[TieredSlot] = []  # released, with copies of a GPU under way
        self._hidden: deque[TieredSlot] = deque()  # of which a tensor over the memory has died
        self._urgent = 0
        self._updates = 0
        self._is_update_waiting = False
        self._closed = False
        self.written_bytes = 0
        """Bytes written to drives so far."""
        self.read_bytes = 0
        """Bytes read from drives so far."""
        self.unplanned = 0
        """How often a copy had to be waited for, or to make space, that no plan had in mind."""

    # -- space

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the host memory and of the drives' files."""
        return sum(size for _, size in self._tails) + sum(drive.capacity_bytes for drive in self._drives)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the store has taken."""
        return sum(size for _, size in self._tails)

    def reserve(self, nbytes: int, tiers: Tiers | None = None) -> None:
        """Take the host memory for slots of `nbytes` in all, and what `tiers` need of the drives. Raises StoreError."""
        with self._lock:
            self._grow_to(min(whole_pages(nbytes), self.host_budget_bytes))
            below = max(nbytes - self.host_budget_bytes, 0 if tiers is None else tiers.disk_bytes)
            for drive in self._drives:
                drive.reserve(whole_pages(-(-below // len(self._drives))))

    def _new_pages(self, nbytes: int) -> Tensor:
        self._files.append(os.memfd_create("overspill"))
        os.ftruncate(self._files[-1], nbytes)
        return torch.frombuffer(mmap.mmap(self._files[-1], nbytes), dtype=torch.uint8)

    def _grow_to(self, nbytes: int) -> None:
        nbytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if (missing := nbytes - self.host_bytes) > 0:
            self._add_chunk(missing)
            self._memory.give([HostPiece(len(self._tails) - 1, 0, missing)])

    def allocate(self, nbytes: int) -> TieredSlot:
        """Return a slot for `nbytes` bytes; it takes memory once it is written."""
        rounded = max(PAGE_BYTES, whole_pages(nbytes))
        with self._lock:
            self._take_back()
            if rounded > self.host_budget_bytes:
                raise StoreError(
                    f"a tensor of {format_bytes(nbytes)} has to pass through host memory, and "
                    f"host_budget={format_bytes(self.host_budget_bytes)} is less; give it {format_bytes(rounded)}"
                )
            number = self._numbers.pop() if self._numbers else next(self._next_number)
            self._used_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
            return TieredSlot(-2 - number, 0, rounded)

    def expect(self, updates: int) -> None:
        """Note so many more updates on the host to come; copies wait for the memory that these give back."""
        with self._lock:
            self._updates += updates
        self._wake()

    def release(self, slot: Slot) -> None:
        """Free `slot`; safe to call anywhere, because it takes no lock."""
        super().release(slot)
        self._wake()

    def _take_back(self) -> None:
        cooling, self._cooling = self._cooling, []
        for slot in cooling:
            self._dispose(slot)
        while self._hidden:
            slot = self._hidden.popleft()
            slot.state.shown -= 1
            self._dispose(slot)
        while self._returned:
            released = self._returned.popleft()
            assert isinstance(released, TieredSlot)
            released.state.is_released = True
            self._used_bytes -= released.nbytes
            self._dispose(released)

    def _dispose(self, slot: TieredSlot) -> None:
        """Give back all of a released slot that nobody uses any more."""
        state = slot.state
        if not state.is_released or state.users or state.is_gone:
            return
        if self._is_busy(slot):
            self._cooling.append(slot)
            return
        state.is_gone = True
        self._drop(slot)
        if state.place is not None:
            self._drives[state.drive].release(state.place)
        self._numbers.append(-2 - slot.chunk)

    def _drop(self, slot: TieredSlot) -> None:
        """Give back a slot's host memory."""
        if slot.state.pieces is not None:
            self._memory.give(slot.state.pieces)
            slot.state.pieces = None
            del self._in_memory[slot]

    # -- waiting

    def _wake(self) -> None:
        for waiting in tuple(self._waiting):
            if waiting.locked():
                try:
                    waiting.release()
                except RuntimeError:  # another thread was first
                    continue

    def _wait(self) -> None:
        """Wait, with the store's lock given back, until anything has changed. Raises StoreError if it is closed."""
        bell = threading.Lock()
        bell.acquire()
        self._waiting.append(bell)
        self._lock.release()
        try:
            bell.acquire(timeout=_LOOK_AGAIN_SECONDS)
        finally:
            self._lock.acquire()
            self._waiting.remove(bell)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(CLOSED)
        for drive in self._drives:
            drive.check_process()

    def _await(self, ticket: Ticket) -> None:
        """Wait for a drive, with the store's lock given back. Raises its StoreError."""
        self._lock.release()
        try:
            ticket.wait()
        finally:
            self._lock.acquire()
        self._check_open()

    # -- host memory; the lock is held

    def _space(self, nbytes: int, *, must: bool) -> tuple[HostPiece, ...]:
        """Return free host memory; if it `must` be, copies that are wanted soon leave for it. Raises StoreError."""
        while True:
            self._take_back()
            if (pieces := self._memory.take(nbytes)) is not None:
                return pieces
            if self.host_bytes < self.host_budget_bytes // PAGE_BYTES * PAGE_BYTES:
                self._grow_to(min(self.host_budget_bytes, max(2 * self.host_bytes, self.host_bytes + nbytes)))
                continue
            # With updates to come, copies wait for what these give back; but nothing that an update waits for does.
            now = self._is_update_waiting and not must if self._updates else must or self._urgent > 0
            leaving = self._leaving(must=now)
            busy = self._cooling[0] if self._cooling else leaving
            if busy is not None and self._is_busy(busy):
                self._settle(busy)
            elif leaving is None:
                self._wait()
            elif leaving.state.is_on_disk:
                self._drop(leaving)
            else:
                self._await(leaving.state.writing or self._start_writing(leaving))

    def _leaving(self, *, must: bool) -> TieredSlot | None:
        """Return the slot that makes space next, or None if none can."""
        first = other = None
        for slot, state in ((slot, slot.state) for slot in self._in_memory):
            if state.users and state.writing is None:
                continue
            if state.is_leaving and state.is_on_disk and not state.users:
                return slot
            if state.is_leaving:
                first = first or slot
            other = other or slot
        if first is None and must and other is not None:
            self.unplanned += 1
            return other
        return first

    def _place(self, slot: TieredSlot) -> None:
        """Give a slot a place on the drive that has the fewest bytes."""
        slot.state.drive = min(range(len(self._drives)), key=lambda number: self._drives[number].used_bytes)
        slot.state.place = self._drives[slot.state.drive].allocate(slot.nbytes)

    def _start_writing(self, slot: TieredSlot) -> Ticket:
        state = slot.state
        if state.place is None:
            self._place(slot)
        state.writing = self._writers[state.drive].submit(slot, _NOTHING)
        return state.writing

    def _start_reading(self, slot: TieredSlot) -> Ticket:
        slot.state.reading = self._readers[slot.state.drive].submit(slot, _NOTHING)
        return slot.state.reading

    def _enter(self, slot: TieredSlot, *, to_fill: bool, to_update: bool = False) -> None:
        """Get the slot's bytes into host memory, and keep them there; `to_fill` takes memory without its bytes."""
        self._check_open()
        state = slot.state
        if state.shown and not to_fill and not state.users and state.pieces is not None:
            self._settle(slot)  # it may have changed where it is shown
            self._forget_if_shown(slot)
        while state.pieces is None or state.reading is not None:
            if to_fill and state.reading is None:
                pieces = self._space(slot.nbytes, must=not to_update)
                state.pieces = pieces
                self._in_memory[slot] = None
                continue
            if not to_fill and state.reading is None and not state.is_on_disk:
                break  # never written: whatever is there
            self.unplanned += state.reading is None
            self._urgent += 1
            self._wake()
            try:
                self._await(state.reading or self._start_reading(slot))
            finally:
                self._urgent -= 1
        state.users += 1
        state.is_leaving = False
        if state.pieces is not None:
            self._in_memory.move_to_end(slot)

    def _leave(self, slot: TieredSlot) -> None:
        slot.state.users -= 1
        self._forget_if_shown(slot)
        self._dispose(slot)
        self._wake()

    # -- the threads of the drives

    def to_disk(self, slot: Slot) -> None:
        """Let `slot` go on to its drive: from now on it makes space before others."""
        if not isinstance(slot, TieredSlot):
            return
        with self._lock:
            state = slot.state
            state.is_leaving = True
            if state.pieces is not None and not (state.is_on_disk or state.writing or state.shown):
                self._start_writing(slot)
        self._wake()

    def from_disk(self, slot: Slot) -> None:
        """Bring `slot` back from its drive, as soon as there is space."""
        if not isinstance(slot, TieredSlot):
            return
        with self._lock:
            state = slot.state
            state.is_leaving = False
            if state.pieces is None and state.is_on_disk and state.reading is None:
                self._start_reading(slot)

    def _write_out(self, slot: Slot) -> None:
        """Write a slot to its drive, on the drive's thread."""
        assert isinstance(slot, TieredSlot)
        state = slot.state
        with self._lock:
            state.users += 1
            pieces, place, version = state.pieces, state.place, state.version
        try:
            if pieces is not None and place is not None and not state.is_released:
                with self._lock:
                    self._settle(slot)
                self._drives[state.drive].write_pieces(place, self._views(pieces))
                with self._lock:
                    state.is_on_disk = state.version == version
                    self.written_bytes += slot.nbytes
        finally:
            with self._lock:
                state.writing = None
                self._leave(slot)

    def _read_in(self, slot: Slot) -> None:
        """Read a slot from its drive, on the drive's thread."""
        assert isinstance(slot, TieredSlot)
        state = slot.state
        with self._lock:
            state.users += 1
        try:
            if state.place is not None and not state.is_released:
                with self._lock:
                    pieces = self._space(slot.nbytes, must=False)
                try:
                    self._drives[state.drive].read_pieces(state.place, self._views(pieces))
                except BaseException:
                    with self._lock:
                        self._memory.give(pieces)
                    raise
                with self._lock:
                    state.pieces = pieces
                    self._in_memory[slot] = None
                    self.read_bytes += slot.nbytes
        finally:
            with self._lock:
                state.reading = None
                self._leave(slot)

    def _is_busy(self, slot: TieredSlot) -> bool:
        """Return whether copies of a GPU from or to the host memory of `slot` may be under way."""
        events = slot.state.events
        while events and events[0].query():
            events.pop(0)
        return bool(events)

    def _settle(self, slot: TieredSlot) -> None:
        """Wait for these copies, with the store's lock given back."""
        events = list(slot.state.events)
        self._lock.release()
        try:
            for event in events:
                event.synchronize()
        finally:
            self._lock.acquire()

    def _views(self, pieces: Sequence[HostPiece]) -> list[memoryview]:
        return [memory_of(self._chunks[p.chunk][p.offset : p.offset + p.nbytes]) for p in pieces]

    # -- copies of the device's lanes

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy into host memory, releasing the interpreter lock."""
        assert isinstance(slot, TieredSlot)
        with self._lock:
            self._enter(slot, to_fill=True)
            slot.state.is_on_disk = False
            slot.state.version += 1
        try:
            for address, begin, count in self._parts(slot, source.numel()):
                ctypes.memmove(address, source.data_ptr() + begin, count)
        finally:
            with self._lock:
                self._leave(slot)

    def read(self, slot: Slot, target: Tensor) -> None:
        """Copy out of host memory, releasing the interpreter lock."""
        assert isinstance(slot, TieredSlot)
        with self._lock:
            self._enter(slot, to_fill=False)
        try:
            for address, begin, count in self._parts(slot, target.numel()):
                ctypes.memmove(target.data_ptr() + begin, address, count)
        finally:
            with self._lock:
                self._leave(slot)

    def _parts(self, slot: TieredSlot, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the addresses of a slot's host memory, each with the place in the tensor and the bytes there."""
        begin = 0
        for piece in slot.state.pieces or ():
            if (count := min(piece.nbytes, nbytes - begin)) > 0:
                yield self._chunks[piece.chunk].data_ptr() + piece.offset, begin, count
            begin += piece.nbytes

    @contextmanager
    def lent(self, slot: Slot, nbytes: int, *, writes: bool) -> Iterator[UntypedStorage]:
        """Bring the slot into host memory, and let the host use it there. Raises StoreError."""
        assert isinstance(slot, TieredSlot)
        state = slot.state
        with self._lock:
            self._take_back()
            is_new = state.pieces is None and state.reading is None and not state.is_on_disk
            if not (is_shown := bool(state.shown)):
                self._is_update_waiting = True
                try:
                    self._enter(slot, to_fill=is_new, to_update=True)
                finally:
                    self._is_update_waiting = False
        if is_shown or not nbytes:  # others see what it becomes
            yield self.memory(slot, nbytes) if nbytes else UntypedStorage(0)
            return
        try:
            assert state.pieces is not None
            parts = [(self._files[piece.chunk], piece.offset, piece.nbytes) for piece in state.pieces]
            with ExitStack() as mapped:
                if len(parts) == 1:
                    address, *_ = next(self._parts(slot, nbytes))
                else:
                    address = mapped.enter_context(host_memory.in_a_row(parts))
                yield storage_over(address, torch.device("cpu"), nbytes)
        finally:
            with self._lock:
                if writes:
                    state.is_on_disk = False
                    state.version += 1
                self._leave(slot)

    def hold(self, tensor: Tensor) -> Slot:
        """Copy a tensor of host memory into the store, so that its own memory can be freed. Raises StoreError."""
        slot = self.allocate(tensor.nbytes)
        self.write(slot, HeldSlot.of(tensor).memory)
        return slot

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Map the slot's place on its drive, so that host memory is free for other slots. Raises StoreError."""
        assert isinstance(slot, TieredSlot)
        state = slot.state
        with self._lock:
            self._check_open()
            while state.pieces is not None and not state.is_on_disk:
                self._await(state.writing or self._start_writing(slot))
            while state.reading is not None:
                self._await(state.reading)
            if state.place is None:  # it was never written
                self._place(slot)
            state.shown += 1
            state.is_on_disk = True
            self._forget_if_shown(slot)
            place = state.place
        holds = _Holds(keep)
        weakref.finalize(holds, self._hide, slot).atexit = False
        assert place is not None
        return self._drives[state.drive].shown(place, nbytes, holds)

    def memory(self, slot: Slot, nbytes: int) -> UntypedStorage:
        """Map the slot's place on its drive, as `shown` does. Raises StoreError."""
        return self.shown(slot, nbytes, None).untyped_storage()

    def _forget_if_shown(self, slot: TieredSlot) -> None:
        """Drop the host memory of a slot that anybody may change where it is shown."""
        if slot.state.shown and not slot.state.users and not self._is_busy(slot):
            self._drop(slot)

    def _hide(self, slot: TieredSlot) -> None:
        """Note that a tensor over the slot's memory has died; a finalizer, which takes no lock."""
        self._hidden.append(slot)
        self._wake()

    def close(self) -> None:
        """End the drives' threads, and free host memory and files."""
        self._closed = True
        self._wake()
        for lane in (*self._writers, *self._readers):
            lane.close()
        for drive in self._drives:
            drive.close()
        super().close()
        self._close_files()


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


class _Holds:
    """What a tensor over a slot keeps alive."""

    def __init__(self, kept: object) -> None:
        self._kept = kept


def alive(store: weakref.ref[S]) -> S:
    """Return the store. Raises StoreError if it is gone."""
    if (found := store()) is None:
        raise StoreError(CLOSED)
    return found


def directories_of(given: Directories) -> list[str | Path | None]:
    """Return the directory of each drive; None: where temporary files go. Raises RequestError."""
    if given is None or isinstance(given, (str, Path)):
        return [given]
    if not given:
        raise RequestError("store_dir=[]: name a directory for each drive, or leave it out")
    return [*given]


def default_host_bytes() -> int:
    """Return the host memory that a store takes if no budget is given: what is free, less a tenth."""
    return host_memory.available_bytes() * 9 // 10


class HostDiskStore(TieredStore):
    """Pageable host memory up to a budget, and a disk below it."""

    name = "host+disk"
