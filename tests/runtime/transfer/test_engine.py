"""The transfer engine: bytes, strides and handles, the same over threads and over streams whose copies come late."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from tests.runtime.transfer.engines import ENGINES, bring, numbers, send, with_streams, with_threads
from torch import Tensor

from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.stores import Store


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[TransferEngine]:
    made = ENGINES[request.param]()
    yield made
    made.close()
    assert getattr(made.store, "copied_dead_memory", 0) == 0


TENSORS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: numbers(3, 5, 7),
    "scalar": lambda: torch.tensor(3.5),
    "channels last": lambda: numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: numbers(6, 9).t(),
    "sliced, with an offset": lambda: numbers(10, 11)[2:8:2, 3:9],
    "expanded": lambda: numbers(1, 4).expand(5, 4),
    "bool": lambda: numbers(100, dtype=torch.int64) % 3 == 0,
    "int64": lambda: numbers(33, dtype=torch.int64) - 2**62,
    "bfloat16": lambda: numbers(7, 9, dtype=torch.bfloat16).t(),
    "complex": lambda: torch.complex(numbers(8), -numbers(8)),
    "no elements": lambda: torch.empty(0, 3),
    "larger than a page": lambda: numbers(123, 457),
    "nan and minus zero": lambda: torch.tensor([float("nan"), -0.0, float("-inf")]),
}


def storage_bytes(tensor: Tensor) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_to_the_last_bit_and_as_it_lay(engine: TransferEngine, kind: str) -> None:
    source = TENSORS[kind]()
    expected = storage_bytes(source)
    layout = (source.shape, source.stride(), source.storage_offset(), source.dtype, source.device)
    handle = send(engine, source)
    del source
    back = bring(engine, handle)
    assert (back.shape, back.stride(), back.storage_offset(), back.dtype, back.device) == layout
    assert storage_bytes(back) == expected


def test_what_compute_writes_after_the_copy_was_awaited_does_not_reach_it(engine: TransferEngine) -> None:
    source = numbers(1000)
    handle = send(engine, source)
    source.zero_()
    assert torch.equal(bring(engine, handle), numbers(1000))


@pytest.mark.parametrize(
    "kind", ["contiguous", "channels last", "transposed", "bfloat16", "larger than a page", "scalar"]
)
def test_a_tensor_that_is_held_comes_from_where_it_is_and_is_not_copied(engine: TransferEngine, kind: str) -> None:
    source = TENSORS[kind]()
    expected = source.clone()
    handle = engine.hold(source, torch.device("cpu"))
    for _ in range(2):
        back = bring(engine, handle)
        assert back.data_ptr() != source.data_ptr()
        assert (back.shape, back.stride()) == (source.shape, source.stride())
        assert torch.equal(back, expected)
    assert engine.store.used_bytes == engine.offloaded_bytes == 0
    assert engine.to_host(handle).data_ptr() == source.data_ptr()


def test_a_part_of_larger_memory_is_held_alone(engine: TransferEngine) -> None:
    whole = numbers(4, 1000)
    back = bring(engine, engine.hold(whole[1], torch.device("cpu")))
    assert torch.equal(back, whole[1])
    assert back.untyped_storage().nbytes() == whole[1].nbytes


def test_what_the_user_writes_to_a_held_tensor_does_not_reach_a_copy_that_is_under_way(engine: TransferEngine) -> None:
    source = numbers(1000)
    handle = engine.hold(source, torch.device("cpu"))
    coming = engine.prefetch(handle)
    engine.to_host(handle).zero_()
    engine.await_prefetch(coming)
    assert torch.equal(coming, numbers(1000))


@pytest.mark.parametrize("store", [DiskStore, HostStore])
def test_what_is_stored_can_be_read_on_the_host(store: type[Store]) -> None:
    with closing(with_threads(store())) as engine:
        source = numbers(6, 9).t()
        handle = engine.offload(source)
        found = engine.to_host(handle)
        assert found.stride() == source.stride()
        assert torch.equal(found, numbers(6, 9).t())
        assert torch.equal(bring(engine, handle), source)


def test_one_handle_can_be_prefetched_twice_even_at_once(engine: TransferEngine) -> None:
    handle = send(engine, numbers(5000))
    assert torch.equal(bring(engine, handle), numbers(5000))
    first, second = engine.prefetch(handle), engine.prefetch(handle)
    engine.await_prefetch(second)
    engine.await_prefetch(first)
    assert torch.equal(first, second)
    assert torch.equal(first, numbers(5000))
    assert first.data_ptr() != second.data_ptr()


def test_many_transfers_can_be_in_flight_each_way(engine: TransferEngine) -> None:
    handles = [engine.offload(numbers(999) + i) for i in range(40)]
    for handle in handles:
        engine.await_offload(handle)
    tensors = [engine.prefetch(handle) for handle in handles]
    for tensor in reversed(tensors):
        engine.await_prefetch(tensor)
    assert all(torch.equal(tensor, numbers(999) + i) for i, tensor in enumerate(tensors))


def test_both_ways_can_be_in_flight_at_once(engine: TransferEngine) -> None:
    first = send(engine, numbers(4000))
    back, second = engine.prefetch(first), engine.offload(-numbers(4000))
    engine.await_offload(second)
    engine.await_prefetch(back)
    assert torch.equal(back, numbers(4000))
    assert torch.equal(bring(engine, second), -numbers(4000))


def test_the_source_may_die_before_the_copy_is_awaited(engine: TransferEngine) -> None:
    handle = engine.offload(numbers(100_000))
    rubbish = [torch.full((100_000,), -1.0) for _ in range(5)]
    engine.await_offload(handle)
    assert torch.equal(bring(engine, handle), numbers(100_000))
    del rubbish


def test_bytes_are_counted_each_way(engine: TransferEngine) -> None:
    handle = send(engine, numbers(10, 10)[3:5])
    bring(engine, handle)
    bring(engine, handle)
    assert (engine.offloaded_bytes, engine.prefetched_bytes) == (400, 800)


def test_the_slot_comes_back_when_the_handle_dies(engine: TransferEngine) -> None:
    handle = send(engine, numbers(100))
    bring(engine, handle)
    assert (engine.stored_count, engine.store.used_bytes) == (1, 4096)
    del handle
    assert (engine.stored_count, engine.store.used_bytes) == (0, 0)


def test_the_slot_comes_back_when_the_handle_was_never_prefetched(engine: TransferEngine) -> None:
    send(engine, numbers(100))
    assert (engine.stored_count, engine.store.used_bytes) == (0, 0)


def test_the_slot_comes_back_when_the_offload_was_never_awaited() -> None:
    for make in (with_threads, with_streams):
        with closing(make(HostStore())) as engine:
            engine.offload(numbers(100))
            assert (engine.stored_count, engine.store.used_bytes) == (0, 0)


def test_a_view_of_the_handle_keeps_the_slot(engine: TransferEngine) -> None:
    handle = send(engine, numbers(100))
    view = handle.view(1, 1).detach()
    del handle
    assert torch.equal(bring(engine, view), numbers(100))
    del view
    assert engine.stored_count == 0


@pytest.mark.parametrize("with_backward", [True, False])
def test_a_handle_saved_by_autograd_gives_its_slot_back_with_the_graph(
    engine: TransferEngine, with_backward: bool
) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(send(engine, x))
            return x * x

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return 2 * gradient * bring(engine, *ctx.saved_tensors)

    x = numbers(50).requires_grad_()
    y = Square.apply(x).sum()
    assert engine.stored_count == 1
    if with_backward:
        y.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * numbers(50))
    del y
    gc.collect()
    assert (engine.stored_count, engine.store.used_bytes) == (0, 0)


def test_rounds_of_the_same_tensors_need_no_more_room_than_the_first(engine: TransferEngine) -> None:
    capacities = []
    for _ in range(5):
        handles = [send(engine, numbers(n)) for n in (10, 5000, 100, 20_000)]
        for handle in handles:
            bring(engine, handle)
        del handle, handles
        capacities.append(engine.store.capacity_bytes)
    assert capacities == [capacities[0]] * 5
