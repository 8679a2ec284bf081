"""Lanes: where transfers of one direction run one after another, beside compute. Threads on the CPU, streams on CUDA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


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
    """A lane of one thread. Its jobs spend their time in system calls and memory copies that release the interpreter lock."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"overspill-{name}")

    def submit(self, job: Callable[[Tensor], None], tensor: Tensor) -> Ticket:
        """Start `job(tensor)` on the lane's thread."""
        # The thread lets go of the tensor before it says that it is done: else its memory would live on until the
        # thread is scheduled again.
        held = [tensor]
        return _ThreadTicket(self._pool.submit(lambda: job(held.pop())), tensor)

    def close(self) -> None:
        """Drop what has not started, finish what has, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _ThreadTicket(Ticket):
    def __init__(self, future: Future[None], tensor: Tensor) -> None:
        self._future = future
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        self._future.result()
        self._tensor = None


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
