"""Lanes: each carries out the transfers of one direction, in order, concurrently with compute.

A lane is a thread on the CPU, and a stream on other devices. Compute pays for every transfer that it starts and awaits,
so both take few calls and objects.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from overspill.core.errors import StoreError
from overspill.pytorch.storages import storage_over
from overspill.runtime import accelerator

from . import _copies


@dataclass(frozen=True)
class Slot:
    """A place in a store."""

    chunk: int
    """Number of the arena chunk."""
    offset: int
    """First byte within the chunk."""
    nbytes: int


@dataclass(frozen=True, eq=False)
class HeldSlot(Slot):
    """The place of a tensor that was in host memory before, and is only read there."""

    tensor: Tensor
    """The tensor itself, dense."""

    @classmethod
    def of(cls, tensor: Tensor) -> HeldSlot:
        """Return the slot of `tensor`."""
        return cls(-1, 0, tensor.nbytes, tensor)

    @property
    def memory(self) -> Tensor:
        """Its bytes, as a uint8 tensor of one dimension."""
        begin = self.tensor.storage_offset() * self.tensor.itemsize
        return bytes_of(self.tensor.untyped_storage())[begin : begin + self.nbytes]


Copy = Callable[[Slot, Tensor], None]
"""A store's read or write: of a slot, from or to memory given as a one-dimensional uint8 tensor."""


class Ticket(Protocol):
    """A transfer in progress.

    It keeps the memory that it reads or fills alive until it has been awaited.
    """

    def wait(self) -> None:
        """Block later work of the compute stream until the transfer is done. Raises its errors."""


class LaneWork(Protocol):
    """Work of a lane's thread."""

    def carry_out(self, copy: Copy) -> None:
        """Do it; raises nothing."""

    def drop(self) -> None:
        """Note that it will never be done."""

    def wait(self) -> None:
        """Wait until it is done or dropped."""


class Awaited(Protocol):
    """What the host does in a thread of its own."""

    def wait(self) -> None:
        """Wait until it is done, or will never be."""

    def then(self, call: Callable[[], None]) -> None:
        """Call `call()` then, before `wait` returns; at once if it is done."""


class Noted(Protocol):
    """Callbacks for the begin and end of a copy."""

    def begin(self, stream: Any = None) -> None:
        """Note that the copy begins now, or at this point of `stream`."""

    def end(self, stream: Any = None) -> None:
        """Note that the copy ends now, or at this point of `stream`."""


class Lane(ABC):
    """Copies in one direction, in the order submitted, concurrently with compute."""

    @abstractmethod
    def submit(self, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Start a copy between `slot` and `memory`, after all work given to compute.

        `noted` is called when the copy begins and ends.
        """

    @abstractmethod
    def submit_after(self, update: Awaited, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Start a copy as `submit` does, but not before the host has done with `update`."""

    @abstractmethod
    def mark(self) -> Callable[[], None]:
        """Return a function by which the host waits for what compute and this lane have to do up to now."""

    @abstractmethod
    def drain(self) -> None:
        """Wait on the host until all copies that were submitted are done, or have failed."""

    @abstractmethod
    def close(self) -> None:
        """Release the thread or stream once it is idle.

        Copies that have not started may be dropped.
        """


class ThreadLane(Lane):
    """A lane of one thread; its copies release the interpreter lock.

    The copies are system calls and memory moves. A finalizer may use the queue even in the middle of a `put` of the
    same thread. The pools of `concurrent.futures` have locks on which such a finalizer would wait forever. A forked
    child has no such thread, so `submit` copies itself.
    """

    def __init__(self, name: str, copy: Copy) -> None:
        """Start the thread. Raises StoreError if the system refuses one."""
        self._copy = copy
        self._process = os.getpid()
        self._jobs: SimpleQueue[LaneWork | None] = SimpleQueue()
        self._thread = Thread(target=_carry_out_all, args=(self._jobs, copy), name=f"overspill-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StoreError(
                f"no thread could be started to copy to and from the store: {error}; see `ulimit -u`"
            ) from None
        self._end = weakref.finalize(self, _end_thread, self._jobs, self._thread, self._process)

    def submit(self, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Start the copy on the lane's thread. Raises StoreError once the lane is closed."""
        ticket = _ThreadTicket(slot, memory) if noted is None else _NotedTicket(slot, memory, noted)
        self.carry_out(ticket)
        return ticket

    def submit_after(self, update: Awaited, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Start the copy on the lane's thread, which waits for `update`. Raises StoreError once the lane is closed."""
        self.carry_out(_After(update))
        return self.submit(slot, memory, noted)

    def carry_out(self, job: LaneWork) -> None:
        """Have a job done by the thread, behind those before; in a forked child do it now."""
        if not self._end.alive:
            raise StoreError(CLOSED)
        if self._process == os.getpid():
            self._jobs.put(job)
        else:
            job.carry_out(self._copy)

    def mark(self) -> Callable[[], None]:
        """Return a function that does nothing: what was awaited is there."""
        return _nothing

    def drain(self) -> None:
        """Wait until the thread has no copy left; one that is closed has none, nor has a forked child's."""
        if self._end.alive and self._process == os.getpid():
            self._jobs.put(mark := _Mark())
            while not mark.passed.wait(1) and self._thread.is_alive():  # it may be closed meanwhile
                pass

    def close(self) -> None:
        """Drop copies that have not started, finish the others, and end the thread."""
        self._end()


CLOSED = "the store has been closed, and with it what was to be copied"


_LOCAL = threading.local()


def is_lane() -> bool:
    """Return whether this is the thread of a lane, in which finalizers must not wait for a transfer."""
    return getattr(_LOCAL, "is_lane", False)


def _carry_out_all(jobs: SimpleQueue[LaneWork | None], copy: Copy) -> None:
    _LOCAL.is_lane = True
    while (ticket := jobs.get()) is not None:
        ticket.carry_out(copy)
        del ticket  # hold no tensor of the last job while waiting for the next


def _end_thread(jobs: SimpleQueue[LaneWork | None], thread: Thread, process: int) -> None:
    """End the thread of a lane that is closed or garbage collected."""
    if process != os.getpid():
        return
    with contextlib.suppress(Empty):
        while True:
            if (ticket := jobs.get_nowait()) is not None:
                ticket.drop()
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


class _ThreadTicket:
    __slots__ = ("_error", "_is_done", "_memory", "_pending", "_process", "_slot")

    def __init__(self, slot: Slot, memory: UntypedStorage) -> None:
        self._slot = slot
        self._memory: UntypedStorage | None = memory
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._is_done = False
        self._pending = Lock()
        self._pending.acquire()

    def carry_out(self, copy: Copy) -> None:
        memory = self._memory
        assert memory is not None
        try:
            copy(self._slot, bytes_of(memory))
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            trace = error.__traceback__
            del memory
            self._finish(error.with_traceback(trace and trace.tb_next))  # this frame would hold the ticket
        else:
            del memory  # before it is done: else it would live on until this thread is scheduled again
            self._finish(None)

    def drop(self) -> None:
        """Mark the ticket as never to be carried out."""
        self._finish(StoreError(CLOSED))

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._is_done = True
        self._pending.release()

    def wait(self) -> None:
        if not self._is_done and self._process != os.getpid():
            raise StoreError(
                "this process was forked while a copy to or from the store was under way, which ends in its parent "
                "only; fork between two steps"
            )
        with self._pending:  # no more than a look, so that several may wait
            pass
        self._memory = None
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # which the error's traceback would hold


class _Mark:
    """A place in the queue of a thread; `passed` is set when the thread comes there."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def carry_out(self, _copy: Copy) -> None:
        self.passed.set()

    def drop(self) -> None:
        self.passed.set()

    def wait(self) -> None:
        self.passed.wait()


class _After:
    """A wait of a thread for the job of another."""

    def __init__(self, update: Awaited) -> None:
        self._update = update

    def carry_out(self, _copy: Copy) -> None:
        self._update.wait()

    def drop(self) -> None:
        """Nothing waits for it."""

    wait = drop


def _nothing() -> None:
    """Wait for nothing."""


class _NotedTicket(_ThreadTicket):
    __slots__ = ("_noted",)

    def __init__(self, slot: Slot, memory: UntypedStorage, noted: Noted) -> None:
        super().__init__(slot, memory)
        self._noted = noted

    def carry_out(self, copy: Copy) -> None:
        noted = self._noted

        def measured(slot: Slot, memory: Tensor) -> None:
            noted.begin()
            copy(slot, memory)
            noted.end()

        super().carry_out(measured)


class _OnStream(Lane):
    """What lanes that are streams have in common."""

    stream: accelerator.DeviceStream

    @abstractmethod
    def _compute_stream(self) -> Any:
        """Return the stream of compute."""

    @abstractmethod
    def _enqueue(self, slot: Slot, memory: UntypedStorage) -> None:
        """Enqueue a copy on this lane's stream, which is the current one."""

    def submit_after(self, update: Awaited, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Enqueue the copy when `update` is done, after the work that compute has now; the host goes on meanwhile."""
        begun = self._compute_stream().record_event()

        def start() -> Ticket:
            self.stream.wait_event(begun)
            if noted is not None:
                noted.begin(self.stream)
            with self.stream:
                self._enqueue(slot, memory)
            if noted is not None:
                noted.end(self.stream)
            return _StreamTicket(self, self.stream.record_event(), memory)

        return _LateTicket(update, start)

    def wait(self, event: Any) -> None:
        """Make later work of the compute stream run after `event`."""
        self._compute_stream().wait_event(event)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until the stream has done its work up to now."""
        found: Callable[[], None] = self.stream.record_event().synchronize
        return found

    def drain(self) -> None:
        """Wait until the stream is idle."""
        self.stream.synchronize()

    close = drain


class _LateTicket:
    """A copy that the thread of an update enqueues when that is done."""

    __slots__ = ("_error", "_start", "_ticket", "_update")

    def __init__(self, update: Awaited, start: Callable[[], Ticket]) -> None:
        self._update = update
        self._start: Callable[[], Ticket] | None = start
        self._ticket: Ticket | None = None
        self._error: BaseException | None = None
        update.then(self._enqueue)

    def _enqueue(self) -> None:
        start, self._start = self._start, None
        assert start is not None
        try:
            self._ticket = start()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error

    def wait(self) -> None:
        self._update.wait()
        if self._error is not None:
            raise self._error
        assert self._ticket is not None
        self._ticket.wait()


class StreamLane(_OnStream):
    """A lane with its own stream.

    `streams` is the module `accelerator`, or a stand-in in tests.
    """

    def __init__(self, device: torch.device, copy: Copy, streams: Any = accelerator) -> None:
        self._streams = streams
        self._device = device
        self._copy = copy
        self.stream: accelerator.DeviceStream = streams.new_stream(device)

    def submit(self, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Enqueue the copy after the compute stream's work so far.

        There is no `record_stream`. The ticket holds the memory until compute waits for the event, so the memory is
        reused only after the copy.
        """
        self.stream.wait_stream(self._streams.current_stream(self._device))
        if noted is not None:
            noted.begin(self.stream)
        with self.stream:
            self._copy(slot, bytes_of(memory))
        if noted is not None:
            noted.end(self.stream)
        return _StreamTicket(self, self.stream.record_event(), memory)

    def _compute_stream(self) -> Any:
        return self._streams.current_stream(self._device)

    def _enqueue(self, slot: Slot, memory: UntypedStorage) -> None:
        self._copy(slot, bytes_of(memory))


class _StreamTicket:
    __slots__ = ("_event", "_lane", "_memory")

    def __init__(self, lane: _OnStream, event: Any, memory: UntypedStorage) -> None:
        self._lane = lane
        self._event = event
        self._memory: UntypedStorage | None = memory

    def wait(self) -> None:
        self._lane.wait(self._event)
        self._memory = None


class CopyLane(_OnStream):
    """A stream for copies to or from page-locked host memory, one native call each."""

    def __init__(self, streams: accelerator.RawStreams, address: Callable[[Slot], int], *, outward: bool) -> None:
        """Make the stream; `address` returns the address of a slot.

        Raises RuntimeError if no library has the functions of such a device.
        """
        self._address = address
        self._compute = streams.compute
        self.stream, raw = streams.new()
        self._copies = _copies.CopyLane(streams.path, streams.prefix, streams.index, raw, outward, streams.current)

    def submit(self, slot: Slot, memory: UntypedStorage, noted: Noted | None = None) -> Ticket:
        """Enqueue the copy after the compute stream's work so far, as StreamLane does."""
        if noted is not None:
            self.stream.wait_stream(self._compute())  # as the copy does: the time until then is not the copy's
            noted.begin(self.stream)
        ticket = self._copies.submit(self._address(slot), memory.data_ptr(), memory.nbytes(), memory)
        if noted is not None:
            noted.end(self.stream)
        return ticket

    def _compute_stream(self) -> Any:
        return self._compute()

    def _enqueue(self, slot: Slot, memory: UntypedStorage) -> None:
        host = bytes_of(storage_over(self._address(slot), torch.device("cpu"), memory.nbytes()))
        bytes_of(memory).copy_(host, non_blocking=True)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return the storage as a uint8 tensor of one dimension, which keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
