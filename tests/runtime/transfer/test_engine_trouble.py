"""The transfer engine in trouble: stores that fail, handles that die early, and closing with work under way."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from tests.runtime.transfer.engines import (
    CPU,
    ENGINES,
    bring,
    numbers,
    send,
    transfer_threads,
    with_late_streams,
    with_streams,
    with_threads,
)
from torch import Tensor

from overspill.core.errors import StoreError
from overspill.runtime.transfer.engine import TransferEngine, make_engine
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import ThreadLane
from overspill.runtime.transfer.stores import Slot, Store


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> TransferEngine:
    return ENGINES[request.param]()


class Failing(HostStore):
    """A host store that refuses to write, or to read."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def write(self, slot: Slot, source: Tensor) -> None:
        if not self.writes:
            raise StoreError("cannot write")
        super().write(slot, source)

    def read(self, slot: Slot, target: Tensor) -> None:
        raise StoreError("cannot read")


def test_a_write_that_fails_in_a_thread_is_raised_where_it_is_awaited() -> None:
    with closing(with_threads(Failing(writes=False))) as engine:
        handle = engine.offload(numbers(10))
        with pytest.raises(StoreError, match="cannot write"):
            engine.await_offload(handle)


def test_a_read_that_fails_in_a_thread_is_raised_where_it_is_awaited() -> None:
    with closing(with_threads(Failing(writes=True))) as engine:
        tensor = engine.prefetch(send(engine, numbers(10)))
        with pytest.raises(StoreError, match="cannot read"):
            engine.await_prefetch(tensor)


@pytest.mark.parametrize("make", [with_threads, with_streams])
def test_a_store_that_fails_is_never_silent(make: Callable[[Store], TransferEngine]) -> None:
    with closing(make(Failing(writes=False))) as engine, pytest.raises(StoreError, match="cannot write"):
        send(engine, numbers(10))


@pytest.mark.parametrize("make", [with_threads, with_streams])
def test_a_write_that_failed_keeps_no_slot(make: Callable[[Store], TransferEngine]) -> None:
    with closing(make(Failing(writes=False))) as engine:
        with contextlib.suppress(StoreError):
            send(engine, numbers(10))
        gc.collect()
        assert (engine.stored_count, engine.store.used_bytes) == (0, 0)


class Broken(HostStore):
    """A host store on a device that fails at some time, after which nothing works any more."""

    works = True

    def read(self, slot: Slot, target: Tensor) -> None:
        if not self.works:
            raise RuntimeError("CUDA error: an illegal memory access")
        super().read(slot, target)


def test_what_is_given_up_may_fail_and_so_may_what_is_awaited_once_more() -> None:
    store = Broken()
    with closing(with_threads(store)) as engine:
        handle = send(engine, numbers(10))
        store.works = False
        given_up, wanted = engine.prefetch(handle), engine.prefetch(handle)
        engine.cancel(given_up)
        engine.settle()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.await_prefetch(wanted)
        store.works = True
        assert torch.equal(engine.await_prefetch(wanted), numbers(10))


def test_an_end_that_fails_gives_all_back_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    for end in (TransferEngine.close, TransferEngine.close_dropped):
        engine = with_threads(HostStore())
        handle = send(engine, numbers(10))
        monkeypatch.setattr(engine._outward, "close", fails)
        with pytest.raises(RuntimeError) if end is TransferEngine.close else contextlib.nullcontext():
            end(engine)
        assert engine.stored_count == len(engine.store._chunks) == 0
        assert not transfer_threads(engine)[1:]
        del handle
    (record,) = (r for r in caplog.records if r.name == "overspill")
    assert record.getMessage().endswith("in order: CUDA error: an illegal memory access")


class Held(HostStore):
    """A host store that does not read until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def read(self, slot: Slot, target: Tensor) -> None:
        self.let_go.wait(10)
        super().read(slot, target)


def reads_what_was_stored_after_its_handle_died(engine: TransferEngine, let_go: Callable[[], None]) -> bool:
    """Whether a prefetch is right that was started before its handle died, and went on while the next offload ran."""
    handle = send(engine, numbers(1000))
    back = engine.prefetch(handle)
    del handle
    other = send(engine, -numbers(1000))
    let_go()
    engine.await_prefetch(back)
    return torch.equal(back, numbers(1000)) and other.numel() == 1


def test_a_slot_is_not_reused_while_a_thread_still_reads_it() -> None:
    store = Held()
    with closing(with_threads(store)) as engine:
        assert reads_what_was_stored_after_its_handle_died(engine, store.let_go.set)


def test_a_slot_is_not_reused_while_a_stream_still_reads_it() -> None:
    with closing(with_late_streams()) as engine:
        assert reads_what_was_stored_after_its_handle_died(engine, lambda: None)


def test_closing_leaves_no_thread_and_can_be_done_twice(engine: TransferEngine) -> None:
    handle = send(engine, numbers(10))
    bring(engine, handle)
    engine.close()
    engine.close()
    assert transfer_threads(engine) == []
    del handle  # the table is gone: nothing to give back, nothing to complain about
    assert engine.stored_count == 0


def test_closing_with_transfers_under_way_is_clean(engine: TransferEngine) -> None:
    ready = send(engine, numbers(100_000))
    handles = [engine.offload(numbers(100_000)) for _ in range(5)]
    tensors = [engine.prefetch(ready) for _ in range(5)]
    engine.close()
    assert transfer_threads(engine) == []
    del ready, handles, tensors


@pytest.mark.parametrize("is_closed", [False, True])
def test_with_its_handle_goes_all_that_was_kept_for_it(engine: TransferEngine, is_closed: bool) -> None:
    memory = numbers(1000).untyped_storage()
    alive = weakref.ref(memory)
    gc.disable()  # which would find it in the end
    try:
        handle = engine.offload(torch.empty(0).set_(memory, 0, (1000,), (1,)))
        del memory
        if is_closed:
            engine.close()
        del handle
        deadline = time.monotonic() + 60  # a thread may be copying it
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert alive() is None
    finally:
        gc.enable()
        engine.close()


def test_a_handle_outlives_its_engine() -> None:
    engine = with_threads(HostStore())
    handle = send(engine, numbers(10))
    engine.close()
    del engine
    gc.collect()
    del handle


def test_a_cpu_engine_uses_one_thread_each_way() -> None:
    engine = make_engine(HostStore(), CPU)
    assert isinstance(engine._outward, ThreadLane)
    handle = send(engine, numbers(10))
    bring(engine, handle)
    assert sorted(transfer_threads(engine)) == ["overspill-offload", "overspill-prefetch"]
    engine.close()
