"""Lanes: jobs in order, errors where they are awaited, and CUDA's ordering rules on a stand-in that defers every copy."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.runtime.transfer.fake_cuda import FakeCuda, LateHostStore
from torch import Tensor

from overspill.core.errors import StoreError
from overspill.runtime.transfer.lanes import StreamLane, ThreadLane
from overspill.runtime.transfer.stores import HostStore

CPU = torch.device("cpu")


def eventually_dead(reference: weakref.ref[Tensor]) -> bool:
    """Whether the tensor dies; a lane's thread may hold it for an instant after it has given its result."""
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return reference() is None


def test_a_thread_lane_runs_jobs_in_the_order_of_submission_on_one_other_thread() -> None:
    lane = ThreadLane("test")
    ran: list[tuple[int, int]] = []
    tickets = [lane.submit(lambda _, i=i: ran.append((i, threading.get_ident())), torch.empty(1)) for i in range(50)]  # type: ignore[misc]
    for ticket in tickets:
        ticket.wait()
    lane.close()
    assert [i for i, _ in ran] == list(range(50))
    assert len({thread for _, thread in ran} - {threading.get_ident()}) == 1


def test_a_thread_lane_does_not_make_submit_wait_for_the_job() -> None:
    lane, gate = ThreadLane("test"), threading.Event()
    ticket = lane.submit(lambda _: (gate.wait(), None)[1], torch.empty(1))
    gate.set()  # reached only if submit came back before the job was done
    ticket.wait()
    lane.close()


def test_an_error_in_a_thread_is_raised_at_wait_each_time_and_only_for_its_job() -> None:
    lane = ThreadLane("test")

    def fail(_: Tensor) -> None:
        raise StoreError("no space")

    failed, good = lane.submit(fail, torch.empty(1)), lane.submit(lambda _: None, torch.empty(1))
    for _ in range(2):
        with pytest.raises(StoreError, match="no space"):
            failed.wait()
    good.wait()
    lane.close()


def test_waiting_twice_for_a_thread_is_fine() -> None:
    lane = ThreadLane("test")
    ticket = lane.submit(lambda _: None, torch.empty(1))
    ticket.wait()
    ticket.wait()
    lane.close()


def test_a_thread_ticket_holds_the_tensor_until_it_has_been_awaited() -> None:
    lane = ThreadLane("test")
    tensor = torch.empty(8)
    reference = weakref.ref(tensor)
    ticket = lane.submit(lambda _: None, tensor)
    del tensor
    time.sleep(0.02)
    assert reference() is not None
    ticket.wait()
    assert eventually_dead(reference)
    lane.close()


def test_closing_a_thread_lane_ends_its_thread_and_can_be_done_twice() -> None:
    lane = ThreadLane("closing")
    lane.submit(lambda _: None, torch.empty(1)).wait()
    assert any(t.name.startswith("overspill-closing") for t in threading.enumerate())
    lane.close()
    lane.close()
    assert not any(t.name.startswith("overspill-closing") for t in threading.enumerate())


def test_closing_a_thread_lane_finishes_what_runs_and_drops_what_has_not_started() -> None:
    lane, gate, started = ThreadLane("test"), threading.Event(), threading.Event()
    ran: list[int] = []
    lane.submit(lambda _: (started.set(), gate.wait(), ran.append(0))[2], torch.empty(1))
    lane.submit(lambda _: ran.append(1), torch.empty(1))
    started.wait()
    threading.Timer(0.05, gate.set).start()
    lane.close()
    assert ran == [0]


def test_the_copy_stream_waits_for_compute_before_the_copy_and_compute_for_an_event_after_it() -> None:
    cuda = FakeCuda()
    lane, store = StreamLane(CPU, cuda), LateHostStore(cuda)
    slot = store.allocate(4)
    ticket = lane.submit(lambda t: store.write(slot, t), torch.zeros(4, dtype=torch.uint8))
    assert cuda.log == ["copy1 waits for compute", "copy on copy1", "copy1 records"]
    ticket.wait()
    assert cuda.log[3:] == ["compute waits for an event of copy1"]


def test_submit_and_wait_never_synchronize_with_the_host() -> None:
    cuda = FakeCuda()
    lane = StreamLane(CPU, cuda)
    for ticket in [lane.submit(lambda _: None, torch.empty(1)) for _ in range(10)]:
        ticket.wait()
    assert not any("synchronizes" in line for line in cuda.log)
    lane.close()
    assert cuda.log[-1] == "copy1 synchronizes"


def test_the_current_stream_is_compute_again_after_submit_even_if_the_job_fails() -> None:
    cuda = FakeCuda()
    lane = StreamLane(CPU, cuda)
    lane.submit(lambda _: None, torch.empty(1))
    assert cuda.current is cuda.compute

    def fail(_: Tensor) -> None:
        raise StoreError("refused")

    with pytest.raises(StoreError):
        lane.submit(fail, torch.empty(1)).wait()
    assert cuda.current is cuda.compute


def test_the_tensor_of_a_stream_copy_lives_until_compute_waits_and_no_longer() -> None:
    cuda = FakeCuda()
    lane, store = StreamLane(CPU, cuda), LateHostStore(cuda)
    slot = store.allocate(4)
    tensor = torch.arange(4, dtype=torch.uint8)
    reference = weakref.ref(tensor)
    ticket = lane.submit(lambda t: store.write(slot, t), tensor)
    del tensor
    assert reference() is not None
    ticket.wait()
    assert reference() is None
    assert store.copied_dead_tensors == 0
    back = torch.zeros(4, dtype=torch.uint8)
    HostStore.read(store, slot, back)
    assert back.tolist() == [0, 1, 2, 3]


def test_a_wait_lets_only_the_copies_up_to_its_event_run() -> None:
    cuda = FakeCuda()
    lane = StreamLane(CPU, cuda)
    ran: list[int] = []

    def copy(number: int) -> Callable[[Tensor], None]:
        return lambda _: cuda.current.queue.append(lambda: ran.append(number))

    tickets = [lane.submit(copy(i), torch.empty(1)) for i in range(3)]
    tickets[1].wait()
    assert ran == [0, 1]
    tickets[2].wait()
    assert ran == [0, 1, 2]


def test_record_stream_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        pytest.fail("record_stream")

    monkeypatch.setattr(torch.Tensor, "record_stream", forbidden)
    lane = StreamLane(CPU, FakeCuda())
    lane.submit(lambda _: None, torch.empty(1)).wait()
    lane.close()
