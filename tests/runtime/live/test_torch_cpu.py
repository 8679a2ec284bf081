"""PyTorch's CPU tensors in memory of a live allocator: those of the thread that asks for it, while it does, and no others."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from tests.runtime.live.live import KIB, POOLS

from overspill.capture.programs.allocations import allocations, peak_of
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.groups import cpu_bytes

MIB = 1 << 20


@pytest.fixture(params=sorted(POOLS))
def allocator(request: pytest.FixtureRequest) -> LiveAllocator:
    return LiveAllocator("host", **POOLS[request.param])


def held(allocator: LiveAllocator) -> int:
    return allocator.statistics().allocated_bytes


def test_a_tensor_made_inside_has_its_memory_from_the_pool_for_as_long_as_it_lives(allocator: LiveAllocator) -> None:
    with allocator.serving():
        inside = torch.arange(1000, dtype=torch.float32)
        assert held(allocator) == inside.nbytes
        del inside
        gone = held(allocator)
        kept = torch.full((40 * KIB,), 3.0)
    outside = torch.full((40 * KIB,), 4.0)
    assert gone == 0
    assert held(allocator) == kept.nbytes
    assert bool((kept + outside == 7).all())
    view = kept[10:20]
    del kept
    assert held(allocator) == 160 * KIB
    assert view.tolist() == [3.0] * 10
    del view
    assert held(allocator) == 0


def test_kernels_compute_the_same_there(allocator: LiveAllocator) -> None:
    torch.manual_seed(0)
    images, weights = torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3)
    expected = torch.nn.functional.conv2d(images, weights).relu().flatten(1) @ torch.ones(8 * 14 * 14, 5)
    with allocator.serving():
        found = torch.nn.functional.conv2d(images, weights).relu().flatten(1) @ torch.ones(8 * 14 * 14, 5)
    assert torch.equal(found, expected)
    assert held(allocator) == found.untyped_storage().nbytes()


def test_the_handle_of_a_stored_tensor_takes_no_block_of_the_pool(allocator: LiveAllocator) -> None:
    """A tight pool has none left: a whole step of ResNet-18 stopped at such a handle."""
    with allocator.serving():
        handle = torch.empty(1, dtype=torch.int64)
    assert held(allocator) == 0
    assert handle.nbytes == 8


def test_a_storage_that_grows_does_so_where_the_thread_is(allocator: LiveAllocator) -> None:
    with allocator.serving():
        tensor = torch.arange(4.0)
    tensor.resize_(8)
    assert tensor[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert held(allocator) == 0
    with allocator.serving():
        tensor.resize_(16)
    assert held(allocator) == 64


def test_other_threads_are_not_served(allocator: LiveAllocator) -> None:
    made: list[torch.Tensor] = []
    with allocator.serving():
        other = threading.Thread(target=lambda: made.append(torch.ones(1000)))
        other.start()
        other.join()
    assert held(allocator) == 0


def test_a_tensor_outlives_the_allocator_and_may_be_freed_by_another_thread(allocator: LiveAllocator) -> None:
    with allocator.serving():
        tensors = [torch.full((30 * KIB,), 5.0)]
    del allocator
    gc.collect()
    assert float(tensors[0].sum()) == 150 * KIB
    other = threading.Thread(target=tensors.clear)
    other.start()
    other.join()


def test_the_innermost_of_several_serves() -> None:
    outer, inner = LiveAllocator("host"), LiveAllocator("host")
    with outer.serving():
        with inner.serving():
            first = torch.ones(100)
        second = torch.ones(200)
    assert (held(outer), held(inner)) == (second.nbytes, first.nbytes)


def test_out_of_memory_is_pytorchs_own_error() -> None:
    allocator = LiveAllocator("host", capacity_bytes=4 * MIB)
    with allocator.serving(), pytest.raises(torch.OutOfMemoryError, match="8388608 bytes"):
        torch.empty(8 * MIB, dtype=torch.uint8)
    with allocator.serving():
        torch.empty(MIB, dtype=torch.uint8)


def test_what_finds_no_room_may_lie_in_pytorchs_own_memory() -> None:
    allocator = LiveAllocator("host", capacity_bytes=4 * MIB)
    allocator.let_spill(True)
    with allocator.serving():
        spilled = torch.full((2 * MIB,), 1.0)
        more = torch.ones(4 * MIB)
        del more
        within = torch.ones(100)
    assert allocator.statistics().peak_spilled_bytes == 24 * MIB
    assert held(allocator) == within.nbytes
    assert float(spilled.sum()) == 2 * MIB
    del spilled
    with allocator.serving():
        again = torch.ones(5 * MIB)
    assert allocator.statistics().peak_spilled_bytes == 24 * MIB
    assert float(again[-1]) == 1


def test_what_is_served_and_what_is_not_is_counted() -> None:
    allocator = LiveAllocator("host")
    begin = cpu_bytes()
    with allocator.serving():
        inside = torch.empty(1000, dtype=torch.uint8)
    outside = torch.empty(3000, dtype=torch.uint8)
    end = cpu_bytes()
    assert (end[0] - begin[0], end[1] - begin[1]) == (inside.nbytes, outside.nbytes)


def test_the_profiler_sees_blocks_of_ours(allocator: LiveAllocator) -> None:
    with allocations() as found, allocator.serving():
        tensor = torch.empty(100 * KIB, dtype=torch.uint8)
        del tensor
        kept = torch.empty(50 * KIB, dtype=torch.uint8)
    assert peak_of(found.changes) == (100 * KIB, kept.nbytes)


def test_a_forked_child_leaves_its_parents_memory_alone(allocator: LiveAllocator) -> None:
    with allocator.serving():
        small, large = torch.full((100,), 1.0), torch.full((200 * KIB,), 2.0)
    child = os.fork()
    if child == 0:  # nothing may fail here but by its exit code
        code = 1
        try:
            with allocator.serving():
                mine = torch.full((200 * KIB,), 3.0)
            code = 0 if float(small.sum()) == 100 and float(large[0]) == 2 and float(mine[-1]) == 3 else 2
            large.fill_(9.0)
            del small, large, mine
            gc.collect()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((small == 1).all())
    assert bool((large == 2).all())
    with allocator.serving():
        again = torch.full((200 * KIB,), 4.0)
    assert bool((large == 2).all())
    assert float(again[0]) == 4
