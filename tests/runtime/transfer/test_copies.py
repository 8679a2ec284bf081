"""Native copies, on a stand-in for the device's library (fake_runtime.cpp): order, events, memory, errors. No GPU is used."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.runtime.transfer import fake_runtime
from tests.runtime.transfer.engines import bring, numbers, send
from tests.runtime.transfer.fake_runtime import COMPILER, lanes, library, log, with_native_copies

from overspill.runtime.transfer import _copies
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import CopyLane

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def test_a_swap_makes_no_more_calls_than_its_order_needs() -> None:
    engine = with_native_copies()
    source = numbers(1000)
    handle = engine.offload(source)
    assert log() == ["compute records", "copy1 waits for compute", "copy1 copies out", "copy1 records"]
    engine.await_offload(handle)
    assert log() == ["compute waits for copy1"]
    tensor = engine.prefetch(handle)
    assert log() == ["compute records", "copy2 waits for compute", "copy2 copies in", "copy2 records"]
    engine.await_prefetch(tensor)
    assert log() == ["compute waits for copy2"]
    assert torch.equal(tensor, source)
    engine.close()


def test_who_is_told_of_a_copy_is_told_round_it_and_no_call_is_left_out() -> None:
    class Told:
        streams: ClassVar[list[Any]] = []

        def begin(self, stream: Any = None) -> None:
            self.streams.append(stream)
            assert log() == []

        def end(self, stream: Any = None) -> None:
            self.streams.append(stream)
            assert log() == ["compute records", "copy1 waits for compute", "copy1 copies out", "copy1 records"]

    log()
    store = HostStore()
    outward, _ = lanes(store)
    outward.submit(store.allocate(4000), numbers(1000).untyped_storage(), Told()).wait()
    assert Told.streams == [outward.stream] * 2


def test_events_are_used_again_and_all_given_back() -> None:
    before = library().fake_events()
    engine = with_native_copies()
    counts = []
    for _ in range(5):
        handles = [engine.offload(numbers(99)) for _ in range(3)]
        for handle in handles:
            engine.await_offload(handle)
        tensors = [bring(engine, handle) for handle in handles]
        del handle, handles, tensors
        counts.append(library().fake_events())
    assert counts == [counts[0]] * 5
    engine.close()
    del engine
    assert library().fake_events() == before


def test_a_copy_holds_its_memory_until_it_is_awaited_and_no_longer() -> None:
    store = HostStore()
    outward, _ = lanes(store)
    memory = numbers(1000).untyped_storage()
    alive = weakref.ref(memory)
    ticket = outward.submit(store.allocate(4000), memory)
    del memory
    assert alive() is not None
    ticket.wait()
    assert alive() is None
    ticket.wait()


def test_what_is_awaited_is_done_though_a_later_copy_is_not() -> None:
    engine = with_native_copies()
    first, second = numbers(1000), -numbers(1000)
    handles = [engine.offload(first), engine.offload(second)]
    engine.await_offload(handles[0])
    first.zero_()
    assert torch.equal(bring(engine, handles[0]), numbers(1000))
    engine.await_offload(handles[1])
    assert torch.equal(bring(engine, handles[1]), second)
    engine.close()


def test_a_refused_copy_is_an_error_that_keeps_no_slot_and_is_the_device_s_last_no_more() -> None:
    engine = with_native_copies()
    library().fake_fail_at(0)
    with pytest.raises(RuntimeError, match="fakeMemcpyAsync: fakeErrorLaunchFailure"):
        engine.offload(numbers(10))
    assert library().fake_error() == 0
    assert (engine.stored_count, engine.store.used_bytes) == (0, 0)
    handle = send(engine, numbers(10))
    library().fake_fail_at(0)
    with pytest.raises(RuntimeError, match="LaunchFailure"):
        engine.prefetch(handle)
    assert torch.equal(bring(engine, handle), numbers(10))
    engine.close()


def test_another_device_than_the_current_one_has_its_own_events_and_default_stream() -> None:
    store = HostStore()
    outward, inward = lanes(store, device=1)
    memory = numbers(100).untyped_storage()
    slot = store.allocate(400)
    outward.submit(slot, memory).wait()  # the stand-in ends the process where devices are mixed
    memory.fill_(0)
    inward.submit(slot, memory).wait()
    assert torch.equal(torch.empty(0).set_(memory, 0, (100,), (1,)), numbers(100))


def test_a_library_that_is_not_there_is_refused() -> None:
    assert not _copies.can_copy("", "nonsense")
    with pytest.raises(RuntimeError, match="nonsense"):
        CopyLane(fake_runtime.FakeStreams("nonsense", 0, lambda _: 0), lambda _: 0, outward=True)


ENDS = """
from tests.runtime.transfer.engines import numbers
from tests.runtime.transfer.fake_runtime import with_native_copies
engine = with_native_copies()
handle = engine.offload(numbers(10))
tensor = engine.prefetch(handle)
"""


@pytest.mark.long
def test_a_program_may_end_with_copies_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        cwd=Path(__file__).parents[3], env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
