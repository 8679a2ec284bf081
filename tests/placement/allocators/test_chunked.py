"""Chunked virtual addressing: any chunks serve any request, and what is wasted is bounded (section 4 of the paper)."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import ALLOCATE, FREE, TRY, Events, allocator_named, replay
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.chunked import ChunkedConfig

MIB = 1 << 20
Row = tuple[int, int, int, int]


def make(chunk_mib: int = 2, capacity_mib: int | None = None) -> Allocator:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return allocator_named("chunked", ChunkedConfig(chunk_mib * MIB), capacity_bytes=capacity)


def log(allocator: Allocator) -> list[tuple[str, int]]:
    return [(event.action, event.nbytes // MIB) for event in allocator.segment_log]


def test_a_block_has_whole_chunks() -> None:
    allocator = make(40)  # the paper's chunk
    allocator.allocate(81 * MIB)
    assert allocator.allocated.now == allocator.reserved.now == 120 * MIB


def test_chunks_that_lie_apart_serve_one_request() -> None:
    # Fig. 7 of Dymem with memory for 600: 200 and 300 are free beside 100 that are live, and 400 are requested.
    allocator = make(2, 600)
    blocks = [allocator.allocate(n * MIB) for n in (200, 100, 300)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(400 * MIB)
    assert allocator.reserved.now == 600 * MIB
    assert log(allocator)[3:] == [("segment_unmap", 200), ("segment_unmap", 200), ("segment_map", 400)]
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(101 * MIB)
    allocator.allocate(100 * MIB)
    allocator.check_integrity()


def test_a_block_of_as_many_chunks_takes_them_as_they_are() -> None:
    allocator = make()
    block = allocator.allocate(5 * MIB)
    allocator.free(block)
    assert allocator.allocate(6 * MIB) == block
    assert log(allocator) == [("segment_map", 6)]


def test_missing_chunks_come_from_the_device() -> None:
    allocator = make(2, 20)
    allocator.free(allocator.allocate(8 * MIB))
    allocator.allocate(12 * MIB)
    assert allocator.reserved.now == 12 * MIB
    allocator.check_integrity()
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(9 * MIB)
    assert allocator.reserved.now == 12 * MIB


@pytest.mark.parametrize("chunk_bytes", [0, -2 * MIB, 3 * MIB, 1])
def test_a_chunk_is_a_multiple_of_2_mib(chunk_bytes: int) -> None:
    with pytest.raises(RequestError, match=r"chunk_bytes .*2097152"):
        ChunkedConfig(chunk_bytes)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 90 * MIB), st.integers(0, 99)), max_size=40),
    chunk=st.sampled_from([2, 6, 40]),
)
def test_a_run_wastes_no_more_than_equation_2_says_and_nothing_outside_its_blocks(
    steps: list[tuple[bool, int, int]], chunk: int
) -> None:
    rows: list[Row] = []
    live: list[int] = []
    most = 0
    for i, (allocates, nbytes, which) in enumerate(steps):
        if allocates or not live:
            rows.append((ALLOCATE, i, nbytes, 0))
            live.append(i)
        else:
            rows.append((FREE, live.pop(which % len(live)), 0, 0))
        most = max(most, len(live))
    config = ChunkedConfig(chunk * MIB)
    done = replay(Events.from_rows(rows), "chunked", config=config, curves=True)
    assert done.allocated is not None
    assert done.requested is not None
    wasted = int((done.allocated - done.requested).max(initial=0))
    assert wasted <= most * (config.chunk_bytes - 1)  # equation 2, in whole bytes
    if all(nbytes > chunk * MIB // 2 for action, _, nbytes, _ in rows if action == ALLOCATE):
        assert done.peak_reserved_bytes == done.peak_allocated_bytes


def test_small_blocks_share_segments_of_a_caching_allocator() -> None:
    allocator = make(40)
    small = [allocator.allocate(nbytes) for nbytes in (1000, 3 * MIB, 20 * MIB)]
    assert log(allocator) == [("segment_alloc", 2), ("segment_alloc", 20), ("segment_alloc", 20)]
    allocator.allocate(20 * MIB + 1)
    assert log(allocator)[3:] == [("segment_map", 40)]
    for address in small:
        allocator.free(address)
    allocator.check_integrity()
    assert allocator.allocate(20 * MIB) == small[1]
    assert allocator.usable_bytes(30 * MIB) == 0  # what small blocks left is no chunk


def test_small_segments_go_back_where_the_device_is_full() -> None:
    allocator = make(4, 40)
    for address in [allocator.allocate(2 * MIB) for _ in range(10)]:  # one segment
        allocator.free(address)
    allocator.allocate(20 * MIB)
    small = allocator.allocate(4 * MIB)
    assert allocator.retries == 1
    assert log(allocator)[-2:] == [("segment_free", 20), ("segment_map", 4)]
    # And chunks that are kept go back where small segments need the memory.
    allocator.allocate(16 * MIB)
    allocator.free(small)
    allocator.allocate(MIB)
    assert log(allocator)[-2:] == [("segment_unmap", 4), ("segment_alloc", 2)]
    allocator.check_integrity()


@pytest.mark.parametrize("chunk", [2, 40])
def test_the_bound_is_reached_when_every_block_ends_one_byte_into_a_chunk(chunk: int) -> None:
    config = ChunkedConfig(chunk * MIB)
    rows = [(ALLOCATE, i, chunk * MIB + 1, 0) for i in range(7)]
    done = replay(Events.from_rows(rows), "chunked", config=config, curves=True)
    assert done.allocated is not None
    assert done.requested is not None
    assert int(np.max(done.allocated - done.requested)) == 7 * (config.chunk_bytes - 1)


def test_it_survives_on_what_its_blocks_take_where_best_fit_does_not() -> None:
    sizes = [10, 30, 10, 30, 10, 30]
    rows: list[Row] = [(ALLOCATE, i, n * MIB, 0) for i, n in enumerate(sizes)]
    rows += [(FREE, i, 0, 0) for i in (1, 3, 5)] + [(ALLOCATE, 9, 90 * MIB, 0)]
    events = Events.from_rows(rows)
    assert replay(events, "chunked", capacity_bytes=120 * MIB).fits
    assert not replay(events, "best-fit", capacity_bytes=120 * MIB).fits


@pytest.mark.parametrize("seed", range(20))
def test_small_blocks_are_placed_as_in_pytorchs_allocator_with_its_default_settings(seed: int) -> None:
    draw = random.Random(seed)
    rows: list[Row] = []
    live: list[int] = []
    for block in range(150):
        if live and draw.random() < 0.45:
            rows.append((FREE, live.pop(draw.randrange(len(live))), 0, 0))
        rows.append((TRY, block, int(2 ** draw.uniform(0, 24)), draw.choice([0, 0, 1])))
        live.append(block)
    capacity = draw.choice([None, 60 * MIB, 101 * MIB])
    events, chunks = Events.from_rows(rows), ChunkedConfig(40 * MIB)
    ours = replay(events, "chunked", capacity_bytes=capacity, config=chunks)
    theirs = replay(events, capacity_bytes=capacity)
    assert ours.addresses.tolist() == theirs.addresses.tolist()
    assert ours.segment_events == theirs.segment_events
    assert (ours.skipped, ours.retries) == (theirs.skipped, theirs.retries)
