"""Every store gives back the bytes it was given, reuses its slots, and says clearly when it cannot."""

from __future__ import annotations

import errno
import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from overspill.core.errors import RequestError, StoreError
from overspill.runtime.accelerator import PageLock
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.pinned_store import PinnedStore
from overspill.runtime.transfer.registry import make_store
from overspill.runtime.transfer.stores import PAGE_BYTES, Slot, Store
from overspill.runtime.transfer.tiers import HostDiskStore

SIZES = (0, 1, 2, 511, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 1_000_003)


class FakePages(PageLock):
    """Records what is locked; `status` is what the driver answers."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.read_only = False

    def lock(self, chunk: Tensor, *, read_only: bool = False) -> int:
        self.read_only = read_only
        self.calls.append("lock")
        if self.status == 0:
            self.locked[chunk.data_ptr()] = chunk.numel()
        return self.status

    def unlock(self, chunk: Tensor) -> None:
        self.calls.append("unlock")
        del self.locked[chunk.data_ptr()]


MAKERS: dict[str, Callable[[], Store]] = {
    "disk": DiskStore,
    "host": HostStore,
    "pinned": lambda: PinnedStore(FakePages()),
}
TIERED: dict[str, Callable[[], Store]] = {"host+disk": lambda: HostDiskStore(None, 10 * PAGE_BYTES)}


@pytest.fixture(params=sorted(MAKERS))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = MAKERS[request.param]()
    yield made
    made.close()


def some_bytes(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(store: Store, slot: Slot, nbytes: int) -> Tensor:
    target = torch.empty(nbytes, dtype=torch.uint8)
    store.read(slot, target)
    return target


def test_bytes_come_back_as_they_went(store: Store) -> None:
    slots = [store.allocate(n) for n in SIZES]
    for i, (slot, n) in enumerate(zip(slots, SIZES, strict=True)):
        store.write(slot, some_bytes(n, i))
    for i, (slot, n) in enumerate(zip(slots, SIZES, strict=True)):
        assert torch.equal(read(store, slot, n), some_bytes(n, i))


def test_nothing_grows_from_the_second_round_on(store: Store) -> None:
    capacities = []
    for _ in range(4):
        slots = [store.allocate(n) for n in SIZES]
        for slot in slots:
            store.release(slot)
        capacities.append(store.capacity_bytes)
    assert capacities == [capacities[0]] * 4
    assert store.used_bytes == 0
    assert store.peak_bytes == capacities[0]


def test_what_was_reserved_needs_no_growth(store: Store) -> None:
    needed = sum(max(1, -(-n // PAGE_BYTES)) * PAGE_BYTES for n in SIZES)
    store.reserve(needed)
    assert store.capacity_bytes == needed
    store.reserve(needed // 2)
    for n in SIZES:
        store.allocate(n)
    assert store.capacity_bytes == needed


def test_a_slot_is_aligned_to_pages_and_holds_what_was_asked(store: Store) -> None:
    for n in SIZES:
        slot = store.allocate(n)
        assert slot.offset % PAGE_BYTES == 0
        assert slot.nbytes >= max(1, n)


class AnyOrder(RuleBasedStateMachine):
    """Allocations, writes and releases in any order: live slots never overlap and keep what was written."""

    make: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make()
        self.live: list[tuple[Slot, Tensor]] = []
        self.seed = 0

    def _fresh(self, nbytes: int) -> Tensor:
        self.seed += 1
        return some_bytes(nbytes, self.seed)

    @rule(nbytes=st.sampled_from(SIZES[:-1]))
    def allocate(self, nbytes: int) -> None:
        slot, content = self.store.allocate(nbytes), self._fresh(nbytes)
        self.store.write(slot, content)
        self.live.append((slot, content))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        slot, old = self.live[index]
        self.live[index] = slot, self._fresh(old.numel())
        self.store.write(*self.live[index])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.store.release(slot)

    @rule(nbytes=st.integers(1, 10 * PAGE_BYTES))
    def reserve(self, nbytes: int) -> None:
        self.store.reserve(nbytes)
        assert self.store.capacity_bytes >= nbytes

    @invariant()
    def live_slots_never_overlap(self) -> None:
        spans = sorted((slot.chunk, slot.offset, slot.offset + slot.nbytes) for slot, _ in self.live)
        assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(spans))

    @invariant()
    def contents_survive(self) -> None:
        for slot, content in self.live:
            assert torch.equal(read(self.store, slot, content.numel()), content)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.store.used_bytes == sum(slot.nbytes for slot, _ in self.live)
        assert self.store.used_bytes <= self.store.peak_bytes <= self.store.capacity_bytes or not self.store.peak_bytes

    def teardown(self) -> None:
        self.store.close()


def _machine(name: str) -> type:
    machine = type(f"AnyOrder_{name}", (AnyOrder,), {"make": staticmethod((MAKERS | TIERED)[name])})
    case: type = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)  # type: ignore[attr-defined]
    return case


TestAnyOrderOnDisk = _machine("disk")
TestAnyOrderInHostMemory = _machine("host")
TestAnyOrderInPinnedMemory = _machine("pinned")
TestAnyOrderInHostMemoryAndOnDisk = _machine("host+disk")


def test_host_memory_that_the_system_refuses_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore()
    slot = store.allocate(10)
    store.write(slot, some_bytes(10))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(StoreError, match=r"1\.0 GiB .*--store"):
            store.reserve(2**30 + PAGE_BYTES)
    assert store.capacity_bytes == PAGE_BYTES
    assert torch.equal(read(store, slot, 10), some_bytes(10))


def test_an_allocation_that_failed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore()
    monkeypatch.setattr(store, "_allocate_chunk", lambda _: (_ for _ in ()).throw(OSError()))
    with pytest.raises(StoreError):
        store.allocate(10)
    assert (store.used_bytes, store.peak_bytes, store.capacity_bytes) == (0, 0, 0)


def test_pinned_memory_is_locked_as_it_grows_and_unlocked_once() -> None:
    pages = FakePages()
    store = PinnedStore(pages)
    store.reserve(PAGE_BYTES)
    store.allocate(PAGE_BYTES)
    store.allocate(5 * PAGE_BYTES)
    assert sorted(pages.locked.values()) == [PAGE_BYTES, 5 * PAGE_BYTES]
    store.close()
    store.close()
    assert pages.locked == {}
    assert pages.calls == ["lock", "lock", "unlock", "unlock"]


def test_a_driver_that_refuses_to_lock_pages_is_a_store_error_and_nothing_stays() -> None:
    pages = FakePages(status=2)
    store = PinnedStore(pages)
    with pytest.raises(StoreError, match="host memory"):
        store.reserve(PAGE_BYTES)
    assert store.capacity_bytes == 0
    store.close()
    assert pages.calls == ["lock"]


def test_a_refusal_to_lock_pages_is_the_device_s_last_error_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    def launch(*_: object, **__: object) -> None:
        launched.append(1)
        raise RuntimeError("the error of another call")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    chunk = torch.zeros(1)
    monkeypatch.setattr(torch, "ones", launch)
    assert PageLock().lock(chunk) == 2
    assert launched == [1]


def test_a_pinned_store_that_is_dropped_unlocks_its_whole_pages_when_its_streams_are_idle() -> None:
    pages, idle = FakePages(), []

    class Busy:
        def synchronize(self) -> None:
            idle.append(len(pages.locked))

    store = PinnedStore(pages)
    store.reserve(3 * PAGE_BYTES)
    store._streams.append(Busy())  # type: ignore[arg-type]
    assert [pointer % PAGE_BYTES for pointer in pages.locked] == [0]
    del store
    gc.collect()
    assert pages.locked == {}
    assert idle == [1]


def test_a_finalizer_may_give_a_slot_back_in_the_middle_of_an_allocation() -> None:
    store = HostStore()
    slot = store.allocate(1)
    find = store._find

    def collected(nbytes: int) -> Slot:
        store.release(slot)
        return find(nbytes)

    store._find = collected  # type: ignore[method-assign]
    thread = threading.Thread(target=store.allocate, args=(1,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert store.used_bytes == PAGE_BYTES


def test_the_advice_of_the_pinned_store_works_on_cuda() -> None:
    with pytest.raises(StoreError) as caught:
        PinnedStore(FakePages(status=2)).reserve(PAGE_BYTES)
    assert "--store disk" not in str(caught.value)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [
        (None, CPU, DiskStore),
        ("disk", CPU, DiskStore),
        ("host", CPU, HostStore),
        (None, CUDA, PinnedStore),
        ("pinned", CUDA, PinnedStore),
    ],
)
def test_a_store_is_made_by_name_or_by_default(name: str | None, device: torch.device, kind: type[Store]) -> None:
    made = make_store(name, device)
    assert type(made) is kind
    made.close()


@pytest.mark.parametrize(
    ("name", "device", "directory", "message"),
    [
        ("tape", CPU, None, "unknown store 'tape'. Stores: disk, host, host+disk, pinned, pinned+disk"),
        ("host", CPU, ".", "--store-dir is for the disk store, not for 'host'"),
        (None, CUDA, ".", "--store-dir is for the disk store"),
        ("pinned", CPU, None, "use --store disk or --store host or --store host+disk"),
        ("disk", CUDA, None, "use --store pinned"),
        ("host", CUDA, None, "use --store pinned"),
    ],
)
def test_a_store_that_cannot_be_is_refused_with_what_can(
    name: str | None, device: torch.device, directory: Path | None, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        make_store(name, device, directory)
    assert message in str(caught.value)


def test_a_tensor_that_is_held_is_read_from_where_it_is(store: Store) -> None:
    given = torch.arange(3 * PAGE_BYTES, dtype=torch.float32).view(3, -1)
    part = given[1:2]  # of larger memory, as each weight of a mapped file
    slot = store.hold(part)
    given += 1
    into = torch.empty(part.nbytes, dtype=torch.uint8)
    store.fetch(slot, into)
    assert torch.equal(into.view(torch.float32), part.view(-1))
    assert (store.used_bytes, store.capacity_bytes) == (0, 0)
    store.release(slot)
    store.let_go()
    assert store.allocate(part.nbytes).offset == 0


def test_pages_of_held_tensors_are_locked_once_a_storage_until_the_last_has_left() -> None:
    pages = FakePages()
    store = PinnedStore(pages)
    whole = torch.arange(4 * PAGE_BYTES, dtype=torch.uint8)
    slots = [store.hold(part) for part in whole.split(PAGE_BYTES)]
    assert pages.locked == {whole.data_ptr(): whole.nbytes}
    assert [store._address(slot) for slot in slots] == [part.data_ptr() for part in whole.split(PAGE_BYTES)]
    for slot in slots[:-1]:
        store.release(slot)
    store.let_go()
    assert pages.calls == ["lock"]
    store.release(slots[-1])
    assert pages.calls == ["lock"]  # a copy may be under way
    store.let_go()
    assert pages.calls == ["lock", "unlock"]
    store.hold(whole)
    store.close()
    assert not pages.locked


def test_tensors_of_a_mapped_file_are_locked_together_to_be_read(tmp_path: Path) -> None:
    """As safetensors gives them: each a storage of its own, on pages that it shares with the next."""
    pages = FakePages()
    store = PinnedStore(pages)
    store.hold(torch.ones(PAGE_BYTES, dtype=torch.uint8))
    assert not pages.read_only
    pages.calls.clear()
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (PAGE_BYTES // 64))
    with (tmp_path / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    parts = [torch.frombuffer(mapped, dtype=torch.uint8, offset=at, count=PAGE_BYTES) for at in (208, 208 + PAGE_BYTES)]
    slots = [store.hold(part) for part in parts]
    assert pages.read_only
    assert pages.calls == ["lock"]
    assert {parts[0].data_ptr() - 208: len(mapped)}.items() <= pages.locked.items()
    store.release(slots[0])
    store.let_go()
    assert pages.calls == ["lock"]
    store.release(slots[1])
    store.let_go()
    assert pages.calls == ["lock", "unlock"]
    store.close()


def test_what_cannot_be_locked_where_it_is_is_copied_to_memory_that_can() -> None:
    class Small(FakePages):
        """Refuses what the store does not allocate."""

        def lock(self, chunk: Tensor, *, read_only: bool = False) -> int:
            return 1 if chunk.data_ptr() == given.data_ptr() else super().lock(chunk, read_only=read_only)

    given = some_bytes(2 * PAGE_BYTES)
    store = PinnedStore(Small())
    slot = store.hold(given)
    into = torch.empty_like(given)
    store.fetch(slot, into)
    assert torch.equal(into, given)
    assert store.used_bytes == given.nbytes
    store.release(slot)
    assert store.used_bytes == 0
    store.close()
