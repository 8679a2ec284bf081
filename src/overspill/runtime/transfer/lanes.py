"""Lanes: where transfers of one direction run one after another, beside compute. Threads on the CPU, streams on CUDA."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import StoreError


class Ticket(ABC):
    """A transfer under way; it keeps the tensor that it reads or fills alive until it has been awaited."""

    @abstractmethod
    def wait(self) -> None:
        """Let nothing that follows on the compute stream run before the transfer is done; raise what went wrong in it."""


class Lane(ABC):
    """Runs jobs in the order they were submitted, beside the compute stream."""

    @abstractmethod
    def submit(self, job: Callable[[Tensor], None], tensor: Tensor) -> Ticket:
        """Start `job(tensor)` after everything that compute has been given so far."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the thread or stream, once nothing runs on it any more; what has not started may be dropped."""


class ThreadLane(Lane):
    """A lane of one thread. Its jobs spend their time in system calls and memory copies that release the interpreter lock.

    A queue that a finalizer may use in the middle of its own `put` feeds it; the pools of `concurrent.futures` have locks
    that a finalizer would wait for in vain. In a forked child, which has no such thread, `submit` carries the job out itself.
    """

    def __init__(self, name: str) -> None:
        """Raises StoreError where the system gives no thread."""
        self._process = os.getpid()
        self._jobs: SimpleQueue[_ThreadTicket | None] = SimpleQueue()
        self._thread = Thread(target=_carry_out_all, args=(self._jobs,), name=f"overspill-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StoreError(
                f"no thread could be started to copy to and from the store: {error}; see `ulimit -u`"
            ) from None
        self._end = weakref.finalize(self, _end_thread, self._jobs, self._thread, self._process)

    def submit(self, job: Callable[[Tensor], None], tensor: Tensor) -> Ticket:
        """Start `job(tensor)` on the lane's thread. Raises StoreError once the lane is closed."""
        if not self._end.alive:
            raise StoreError(CLOSED)
        ticket = _ThreadTicket(job, tensor)
        if self._process == os.getpid():
            self._jobs.put(ticket)
        else:
            ticket.carry_out()
        return ticket

    def close(self) -> None:
        """Drop what has not started, finish what has, and end the thread."""
        self._end()


CLOSED = "the store has been closed, and with it what was to be copied"


_LOCAL = threading.local()


def is_lane() -> bool:
    """Whether this thread is a lane's: what a garbage collection calls here may wait for no transfer."""
    return getattr(_LOCAL, "is_lane", False)


def _carry_out_all(jobs: SimpleQueue[_ThreadTicket | None]) -> None:
    _LOCAL.is_lane = True
    while (ticket := jobs.get()) is not None:
        ticket.carry_out()
        del ticket  # whoever waits for the next job holds no tensor of the last one


def _end_thread(jobs: SimpleQueue[_ThreadTicket | None], thread: Thread, process: int) -> None:
    """End the thread of a lane that is closed or gone."""
    if process != os.getpid():
        return
    with contextlib.suppress(Empty):
        while True:
            if (ticket := jobs.get_nowait()) is not None:
                ticket.drop()
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


class _ThreadTicket(Ticket):
    def __init__(self, job: Callable[[Tensor], None], tensor: Tensor) -> None:
        # The thread lets go of the tensor before it says that it is done: else its memory would live on until the
        # thread is scheduled again.
        held = [tensor]
        self._tensor: Tensor | None = tensor
        self._job: Callable[[], None] | None = lambda: job(held.pop())
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._is_done = False
        self._pending = Lock()
        self._pending.acquire()

    def carry_out(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            trace = error.__traceback__
            self._finish(error.with_traceback(trace and trace.tb_next))  # this frame would hold the ticket
        else:
            del job
            self._finish(None)

    def drop(self) -> None:
        """It will not be carried out any more."""
        self._job = None
        self._finish(StoreError(CLOSED))

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._is_done = True
        self._pending.release()

    def wait(self) -> None:
        if not self._is_done and self._process != os.getpid():
            raise StoreError(
                "this process was forked while a copy to or from the store was under way, which ends in its parent only; "
                "fork between two steps"
            )
        with self._pending:  # no more than a look, so that several may wait
            pass
        self._tensor = None
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # which the error's traceback would hold


class StreamLane(Lane):
    """A lane that is a CUDA stream. `cuda` is `torch.cuda`, or what a test puts in its place."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)

    def submit(self, job: Callable[[Tensor], None], tensor: Tensor) -> Ticket:
        """Enqueue `job(tensor)` behind the compute stream's work so far.

        No `record_stream`: the ticket holds the tensor until compute waits for the event, after which its memory can
        only be reused behind the copy.
        """
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            job(tensor)
            event = self._cuda.Event()
            event.record(self._stream)
        return _StreamTicket(self._cuda, self._device, event, tensor)

    def close(self) -> None:
        """Wait until the stream is idle."""
        self._stream.synchronize()


class _StreamTicket(Ticket):
    def __init__(self, cuda: Any, device: torch.device, event: Any, tensor: Tensor) -> None:
        self._cuda = cuda
        self._device = device
        self._event = event
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        self._cuda.current_stream(self._device).wait_event(self._event)
        self._tensor = None
