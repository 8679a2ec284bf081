"""Lanes: copies in order, errors where they are awaited, and CUDA's ordering rules on a stand-in that defers every copy."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from tests.runtime.transfer.fake_cuda import FakeCuda, LateHostStore
from torch import Tensor, UntypedStorage

from overspill.core.errors import StoreError
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import Slot, StreamLane, ThreadLane

CPU = torch.device("cpu")


def eventually_dead(reference: weakref.ref[UntypedStorage]) -> bool:
    """Whether the memory dies; a lane's thread may hold it for an instant after it has given its result."""
    deadline = time.monotonic() + 60
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return reference() is None


def slot(number: int = 0) -> Slot:
    """A slot that tells its copy from others."""
    return Slot(0, number, 1)


def memory() -> UntypedStorage:
    return torch.empty(1, dtype=torch.uint8).untyped_storage()


def nothing(_slot: Slot, _memory: Tensor) -> None:
    """A copy that does nothing."""


def test_a_thread_lane_makes_copies_in_the_order_of_submission_on_one_other_thread() -> None:
    ran: list[tuple[int, int]] = []
    lane = ThreadLane("test", lambda slot, _: ran.append((slot.offset, threading.get_ident())))
    tickets = [lane.submit(slot(i), memory()) for i in range(50)]
    for ticket in tickets:
        ticket.wait()
    lane.close()
    assert [i for i, _ in ran] == list(range(50))
    assert len({thread for _, thread in ran} - {threading.get_ident()}) == 1


def test_a_thread_lane_does_not_make_submit_wait_for_the_copy() -> None:
    gate = threading.Event()
    lane = ThreadLane("test", lambda *_: (gate.wait(), None)[1])
    ticket = lane.submit(slot(), memory())
    gate.set()  # reached only if submit came back before the job was done
    ticket.wait()
    lane.close()


def test_an_error_in_a_thread_is_raised_at_wait_each_time_and_only_for_its_job() -> None:
    def fail_first(slot: Slot, _: Tensor) -> None:
        if slot.offset == 0:
            raise StoreError("no space")

    lane = ThreadLane("test", fail_first)
    failed, good = lane.submit(slot(0), memory()), lane.submit(slot(1), memory())
    for _ in range(2):
        with pytest.raises(StoreError, match="no space"):
            failed.wait()
    good.wait()
    lane.close()


def test_waiting_twice_for_a_thread_is_fine() -> None:
    lane = ThreadLane("test", nothing)
    ticket = lane.submit(slot(), memory())
    ticket.wait()
    ticket.wait()
    lane.close()


def test_a_thread_ticket_holds_the_memory_until_it_has_been_awaited() -> None:
    lane = ThreadLane("test", nothing)
    held = memory()
    reference = weakref.ref(held)
    ticket = lane.submit(slot(), held)
    del held
    time.sleep(0.02)
    assert reference() is not None
    ticket.wait()
    assert eventually_dead(reference)
    lane.close()


def test_closing_a_thread_lane_ends_its_thread_and_can_be_done_twice() -> None:
    lane = ThreadLane("closing", nothing)
    lane.submit(slot(), memory()).wait()
    assert any(t.name.startswith("overspill-closing") for t in threading.enumerate())
    lane.close()
    lane.close()
    assert not any(t.name.startswith("overspill-closing") for t in threading.enumerate())


def test_closing_a_thread_lane_finishes_what_runs_and_drops_what_has_not_started() -> None:
    gate, started = threading.Event(), threading.Event()
    ran: list[int] = []
    lane = ThreadLane("test", lambda slot, _: (started.set(), gate.wait(), ran.append(slot.offset))[2])
    lane.submit(slot(0), memory())
    lane.submit(slot(1), memory())
    started.wait()
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert ran == [0]


def test_the_copy_stream_waits_for_compute_before_the_copy_and_compute_for_an_event_after_it() -> None:
    cuda = FakeCuda()
    store = LateHostStore(cuda)
    lane = StreamLane(CPU, store.write, cuda)
    ticket = lane.submit(store.allocate(4), torch.zeros(4, dtype=torch.uint8).untyped_storage())
    assert cuda.log == ["copy1 waits for compute", "copy on copy1", "copy1 records"]
    ticket.wait()
    assert cuda.log[3:] == ["compute waits for an event of copy1"]


class Told:
    """Notes in `log` when it is told of a copy."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def begin(self, stream: object = None) -> None:
        self.log.append(f"begins on {getattr(stream, 'name', 'its thread')}")

    def end(self, stream: object = None) -> None:
        self.log.append(f"ends on {getattr(stream, 'name', 'its thread')}")


def test_who_is_told_of_a_copy_on_a_stream_is_told_behind_the_wait_for_compute() -> None:
    cuda = FakeCuda()
    lane = StreamLane(CPU, lambda *_: cuda.log.append(f"copy on {cuda.current.name}"), cuda)
    lane.submit(slot(), memory(), Told(cuda.log)).wait()
    assert cuda.log == [
        "copy1 waits for compute", "begins on copy1", "copy on copy1", "ends on copy1", "copy1 records",
        "compute waits for an event of copy1",
    ]  # fmt: skip


def test_who_is_told_of_a_copy_on_a_thread_is_told_there_before_anybody_has_waited_for_it() -> None:
    log: list[str] = []
    lane = ThreadLane("test", lambda *_: log.append("copy"))
    lane.submit(slot(), memory(), Told(log)).wait()
    assert log == ["begins on its thread", "copy", "ends on its thread"]

    def fail(*_: object) -> None:
        raise StoreError("refused")

    failing = ThreadLane("test", fail)
    with pytest.raises(StoreError, match="refused"):
        failing.submit(slot(), memory(), Told(log)).wait()
    assert log[3:] == ["begins on its thread"]
    lane.close()
    failing.close()


def test_submit_and_wait_never_synchronize_with_the_host() -> None:
    cuda = FakeCuda()
    lane = StreamLane(CPU, nothing, cuda)
    for ticket in [lane.submit(slot(), memory()) for _ in range(10)]:
        ticket.wait()
    assert not any("synchronizes" in line for line in cuda.log)
    lane.close()
    assert cuda.log[-1] == "copy1 synchronizes"


def test_the_current_stream_is_compute_again_after_submit_even_if_the_copy_fails() -> None:
    cuda = FakeCuda()
    StreamLane(CPU, nothing, cuda).submit(slot(), memory())
    assert cuda.current is cuda.compute

    def fail(*_: object) -> None:
        raise StoreError("refused")

    with pytest.raises(StoreError):
        StreamLane(CPU, fail, cuda).submit(slot(), memory()).wait()
    assert cuda.current is cuda.compute


def test_the_memory_of_a_stream_copy_lives_until_compute_waits_and_no_longer() -> None:
    cuda = FakeCuda()
    store = LateHostStore(cuda)
    lane, place = StreamLane(CPU, store.write, cuda), store.allocate(4)
    held = torch.arange(4, dtype=torch.uint8).untyped_storage()
    reference = weakref.ref(held)
    ticket = lane.submit(place, held)
    del held
    assert reference() is not None
    ticket.wait()
    assert reference() is None
    assert store.copied_dead_memory == 0
    back = torch.zeros(4, dtype=torch.uint8)
    HostStore.read(store, place, back)
    assert back.tolist() == [0, 1, 2, 3]


def test_a_wait_lets_only_the_copies_up_to_its_event_run() -> None:
    cuda = FakeCuda()
    ran: list[int] = []
    lane = StreamLane(CPU, lambda slot, _: cuda.current.queue.append(lambda: ran.append(slot.offset)), cuda)
    tickets = [lane.submit(slot(i), memory()) for i in range(3)]
    tickets[1].wait()
    assert ran == [0, 1]
    tickets[2].wait()
    assert ran == [0, 1, 2]


def test_record_stream_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        pytest.fail("record_stream")

    monkeypatch.setattr(torch.Tensor, "record_stream", forbidden)
    lane = StreamLane(CPU, nothing, FakeCuda())
    lane.submit(slot(), memory()).wait()
    lane.close()
