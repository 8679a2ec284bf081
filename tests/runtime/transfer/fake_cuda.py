"""A stand-in for `torch.cuda` that logs streams and events, and a host store whose copies run only when they must have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from overspill.runtime.transfer.stores import HostStore, Slot


class FakeEvent:
    """Marks a place in the queue of the stream that recorded it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.queue.append(self)
        self.cuda.log.append(f"{stream.name} records")


class FakeStream:
    """A queue of work that is carried out when another stream waits for it, which is as late as CUDA may."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.queue: list[FakeEvent | Callable[[], None]] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")
        other.run_until(None)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")
        event.stream.run_until(event)

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self.name} synchronizes")
        self.run_until(None)

    def run_until(self, event: FakeEvent | None) -> None:
        """Carry out the queue up to `event`, or all of it."""
        count = len(self.queue) if event is None else 1 + self.queue.index(event) if event in self.queue else 0
        for item in self.queue[:count]:
            if not isinstance(item, FakeEvent):
                item()
        del self.queue[:count]


class FakeCuda:
    """`Stream`, `Event`, `current_stream` and `stream` as in `torch.cuda`; `log` is what was called, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = FakeStream(self, "compute")
        self.current = self.compute
        self.made = 0

    def Stream(self, device: object) -> FakeStream:
        self.made += 1
        return FakeStream(self, f"copy{self.made}")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: object) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class LateHostStore(HostStore):
    """A host store whose copies are queued on the current fake stream. A copy does not keep its tensor alive."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.copied_dead_tensors = 0

    def write(self, slot: Slot, source: Tensor) -> None:
        self._later(lambda tensor: HostStore.write(self, slot, tensor), source)

    def read(self, slot: Slot, target: Tensor) -> None:
        self._later(lambda tensor: HostStore.read(self, slot, tensor), target)

    def _later(self, copy: Callable[[Tensor], None], tensor: Tensor) -> None:
        self.cuda.log.append(f"copy on {self.cuda.current.name}")
        alive = weakref.ref(tensor)

        def run() -> None:
            if (still := alive()) is None:
                self.copied_dead_tensors += 1
            else:
                copy(still)

        self.cuda.current.queue.append(run)
