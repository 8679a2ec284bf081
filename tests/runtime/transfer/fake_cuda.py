"""A stand-in for `overspill.runtime.accelerator` that logs streams and events, and a host store whose copies run only when they must have."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import HeldSlot, Slot, bytes_of


class FakeEvent:
    """Marks a place in the queue of the stream that recorded it."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self not in self.stream.queue

    def synchronize(self) -> None:
        self.stream.run_until(self)


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
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")
        event.stream.run_until(event)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self)
        self.queue.append(event)
        self.cuda.log.append(f"{self.name} records")
        return event

    def __enter__(self) -> None:
        self.cuda.before.append(self.cuda.current)
        self.cuda.current = self

    def __exit__(self, *_: object) -> None:
        self.cuda.current = self.cuda.before.pop()

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
    """`new_stream` and `current_stream` of accelerator.py; `log` is what was called, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = FakeStream(self, "compute")
        self.current = self.compute
        self.before: list[FakeStream] = []
        self.made = 0

    def new_stream(self, device: object) -> FakeStream:
        self.made += 1
        return FakeStream(self, f"copy{self.made}")

    def current_stream(self, device: object) -> FakeStream:
        return self.current


class LateHostStore(HostStore):
    """A host store whose copies are queued on the current fake stream. A copy does not keep its memory alive."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.copied_dead_memory = 0

    def write(self, slot: Slot, source: Tensor) -> None:
        self._later(lambda tensor: HostStore.write(self, slot, tensor), source)

    def read(self, slot: Slot, target: Tensor) -> None:
        self._later(lambda tensor: HostStore.read(self, slot, tensor), target)

    def fetch(self, slot: Slot, target: Tensor) -> None:
        if isinstance(slot, HeldSlot):
            self._later(lambda tensor: HostStore.fetch(self, slot, tensor), target)
        else:
            self.read(slot, target)

    def _later(self, copy: Callable[[Tensor], None], tensor: Tensor) -> None:
        self.cuda.log.append(f"copy on {self.cuda.current.name}")
        alive = weakref.ref(tensor.untyped_storage())

        def run() -> None:
            if (still := alive()) is None:
                self.copied_dead_memory += 1
            else:
                copy(bytes_of(still))

        self.cuda.current.queue.append(run)
