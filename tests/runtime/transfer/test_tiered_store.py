"""Stores with a disk below host memory: what does not fit goes on and comes back, and a failing disk loses nothing."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.transfer.engines import send
from tests.runtime.transfer.fake_cuda import FakeCuda
from tests.runtime.transfer.test_stores import FakePages, read, some_bytes
from torch import Tensor

from overspill.core.errors import RequestError, StoreError
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.free_memory import FreeMemory, HostPiece
from overspill.runtime.transfer.pinned_tiers import PinnedDiskStore, TieredLane
from overspill.runtime.transfer.registry import make_store
from overspill.runtime.transfer.stores import PAGE_BYTES
from overspill.runtime.transfer.tiers import HostDiskStore, TieredSlot, TieredStore

CPU = torch.device("cpu")


def filled(store: TieredStore, count: int, pages: int = 2) -> list[TieredSlot]:
    slots = [store.allocate(pages * PAGE_BYTES) for _ in range(count)]
    for seed, slot in enumerate(slots):
        store.write(slot, some_bytes(pages * PAGE_BYTES, seed))
    return slots


def settled(store: HostDiskStore) -> None:
    for lane in (*store._writers, *store._readers):
        lane.drain()


def are_right(store: HostDiskStore, slots: list[TieredSlot]) -> bool:
    return all(torch.equal(read(store, slot, slot.nbytes), some_bytes(slot.nbytes, i)) for i, slot in enumerate(slots))


def test_what_host_memory_does_not_hold_is_on_the_disk(tmp_path: Path) -> None:
    store = HostDiskStore(tmp_path, 5 * PAGE_BYTES)
    slots = filled(store, 8)
    assert are_right(store, slots)
    assert store.host_bytes == 5 * PAGE_BYTES
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_a_plan_writes_once_and_reads_ahead(tmp_path: Path) -> None:
    store = HostDiskStore([tmp_path, tmp_path], 8 * PAGE_BYTES)
    slots = filled(store, 3)
    for _ in range(3):  # a copy that does not change, in three steps
        store.to_disk(slots[0])
        settled(store)
        more = filled(store, 2)  # takes its place
        store.release(more[0])
        store.release(more[1])
        store.from_disk(slots[0])
        settled(store)
        assert are_right(store, slots)
    assert store.written_bytes == slots[0].nbytes
    assert store.unplanned == 0
    store.write(slots[0], some_bytes(slots[0].nbytes, 9))
    store.to_disk(slots[0])
    settled(store)
    assert store.written_bytes == 2 * slots[0].nbytes
    assert torch.equal(read(store, slots[0], slots[0].nbytes), some_bytes(slots[0].nbytes, 9))
    store.close()


def test_a_disk_that_is_full_keeps_what_there_is_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostDiskStore(tmp_path, 6 * PAGE_BYTES)
    slots = filled(store, 3)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=f"{tmp_path}.*are missing"):
            filled(store, 1)
        assert are_right(store, slots)
    slots += filled(store, 4)[3:]
    assert are_right(store, slots)
    store.close()


def test_a_read_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostDiskStore(tmp_path, 4 * PAGE_BYTES)
    slots = filled(store, 4)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        store.to_disk(slots[3])
        store.from_disk(slots[0])
        settled(store)
        with pytest.raises(StoreError, match="failed to read"):
            read(store, slots[0], slots[0].nbytes)
    assert are_right(store, slots)
    store.close()


def test_what_is_written_where_a_slot_is_shown_is_kept(tmp_path: Path) -> None:
    store = HostDiskStore(tmp_path, 6 * PAGE_BYTES)
    slots = filled(store, 4)
    shown = store.shown(slots[0], slots[0].nbytes, None)
    assert torch.equal(shown, some_bytes(slots[0].nbytes, 0))
    shown.fill_(7)
    store.to_disk(slots[0])
    filled(store, 4)
    assert bool((shown == 7).all())
    del shown
    gc.collect()
    filled(store, 4)
    assert bool((read(store, slots[0], slots[0].nbytes) == 7).all())
    store.close()


class LateLane(TieredLane):
    """A lane whose copies run only when somebody waits for them, which is as late as CUDA may."""

    def _enqueue_pieces(self, pieces: Sequence[Tensor], memory: Tensor) -> None:
        later = super()._enqueue_pieces
        self._streams.current.queue.append(lambda: later(pieces, memory))


def test_a_gpu_s_copies_are_done_before_their_host_memory_is_another_s(tmp_path: Path) -> None:
    store, cuda = PinnedDiskStore(tmp_path, 6 * PAGE_BYTES), FakeCuda()
    store._pages = store._held.pages = FakePages()
    outward, inward = (LateLane(store, CPU, outward=way, streams=cuda) for way in (True, False))
    nbytes = 2 * PAGE_BYTES
    sources = [some_bytes(nbytes, seed) for seed in range(8)]
    slots = [store.allocate(nbytes) for _ in sources]
    for slot, source in zip(slots, sources, strict=True):
        outward.submit(slot, source.untyped_storage())
    for _ in range(2):
        store.to_disk(slots[7])
        targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in sources]
        for slot, target in zip(slots, targets, strict=True):
            inward.submit(slot, target.untyped_storage())
        store.release(store.allocate(nbytes))
        inward.drain()
        assert all(map(torch.equal, targets, sources))
    assert store.host_bytes == 6 * PAGE_BYTES
    inward.submit(slots[0], targets[0].untyped_storage())
    for slot in slots:  # with a copy under way
        store.release(slot)
    assert torch.equal(read(store, filled(store, 3)[0], nbytes), some_bytes(nbytes, 0))
    store.close()
    assert store._pages.locked == {}


def test_copies_of_any_sizes_fit_in_pieces() -> None:
    free = FreeMemory()
    free.give([HostPiece(0, 0, 10 * PAGE_BYTES)])
    taken = [free.take(PAGE_BYTES) for _ in range(10)]
    for pieces in taken[::2]:
        free.give(pieces or ())
    assert free.take(6 * PAGE_BYTES) is None
    several = free.take(5 * PAGE_BYTES)
    assert several is not None
    assert len(several) == 5
    assert free.take(1) is None
    free.give(several)
    for pieces in taken[1::2]:
        free.give(pieces or ())
    assert free.take(10 * PAGE_BYTES) == (HostPiece(0, 0, 10 * PAGE_BYTES),)


def test_a_tensor_larger_than_host_memory_and_several_directories_elsewhere_are_refused(tmp_path: Path) -> None:
    store = HostDiskStore(tmp_path, PAGE_BYTES)
    with pytest.raises(StoreError, match="host_budget"):
        store.allocate(2 * PAGE_BYTES)
    store.close()
    with pytest.raises(RequestError, match="one directory"):
        make_store("disk", CPU, [tmp_path, tmp_path])


def test_an_update_on_the_host_has_its_memory_in_a_row_and_begins_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostDiskStore(tmp_path, 8 * PAGE_BYTES)
    engine = make_engine(store, CPU)
    first, other = (send(engine, torch.full((2 * PAGE_BYTES // 4,), value)) for value in (1.0, 2.0))
    fillers = [send(engine, torch.zeros(PAGE_BYTES // 4)) for _ in range(4)]
    del fillers[::2]  # what is free is in pieces
    engine.to_disk(first)
    settled(store)
    with store._lock:
        store._take_back()
        slot = engine._table[first.data_ptr()].slot
        assert isinstance(slot, TieredSlot)
        store._drop(slot)
        pages = sorted(piece for _ in range(4) for piece in store._memory.take(PAGE_BYTES) or ())
        store._memory.give([pages[0], pages[-1]])

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def update(weight: Tensor, gradient: Tensor) -> None:
        weight.add_(gradient)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        for what in ("first", "second"):
            engine.update(what, update, [first, other], [first])
        early = engine.prefetch(first)
        with pytest.raises(StoreError, match="failed to read"):
            engine.await_prefetch(early)
    assert bool((engine.await_prefetch(early) == 5).all())
    assert len(slot.state.pieces or ()) == 2
    engine.to_disk(first)
    settled(store)
    assert bool((engine.await_prefetch(engine.prefetch(first)) == 5).all())
    engine.close()
