"""What holds for all allocators: the books agree with the blocks, and errors are clear."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.placement.allocators.caching_oracle import CachingAllocator

from overspill.core.errors import InvalidLayoutError, OutOfMemoryError, RequestError
from overspill.placement import ALLOCATORS, CachingConfig, Events, allocator_named
from overspill.placement.allocators.base import Allocator
from overspill_papers.placement import CnmemConfig

MIB = 1 << 20
Make = Callable[..., Allocator]
sizes = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB), st.sampled_from([MIB, 20 * MIB])
)
steps = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 2), st.integers(0, 99)), max_size=40)
capacities = st.sampled_from([None, 0, 1, 2 * MIB, 30 * MIB, 100 * MIB + 7])
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(steps=steps, capacity=capacities)
def test_after_every_call_the_books_agree_with_the_blocks(
    make: Make, steps: list[tuple[bool, int, int, int]], capacity: int | None
) -> None:
    allocator = make(capacity_bytes=capacity)
    live: list[tuple[int, int]] = []
    for allocates, nbytes, stream, which in steps:
        if allocates or not live:
            try:
                live.append((allocator.allocate(nbytes, stream), nbytes))
            except OutOfMemoryError as error:
                refused = (error.requested_bytes, error.capacity_bytes, error.exit_code)
                assert refused == (nbytes, capacity, 1)
        else:
            allocator.free(live.pop(which % len(live))[0])
        allocator.check_integrity()
        assert allocator.requested.now == sum(nbytes for _, nbytes in live)
        assert allocator.requested.now <= allocator.allocated.now <= allocator.reserved.now
        spans = sorted((address, address + nbytes) for address, nbytes in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for address, _ in live:
        allocator.free(address)
    allocator.check_integrity()
    assert allocator.allocated.now == 0


@pytest.mark.parametrize("seed", range(12))
def test_the_books_agree_under_every_setting(
    name: str, seed: int, random_case: Callable[..., tuple[Events, Any, int | None]]
) -> None:
    events, config, capacity = random_case(name, seed)
    allocator = allocator_named(name, config, capacity_bytes=capacity)
    live: dict[int, int] = {}
    for action, block, nbytes, stream in zip(events.action, events.block, events.nbytes, events.stream, strict=True):
        if action == 1:
            if int(block) in live:
                allocator.free(live.pop(int(block)))
        else:
            try:
                live[int(block)] = allocator.allocate(int(nbytes), int(stream))
            except OutOfMemoryError:
                continue
        allocator.check_integrity()


def test_no_bytes_lie_nowhere_and_cost_nothing(make: Make) -> None:
    allocator = make(capacity_bytes=0)
    assert allocator.allocate(0) == 0
    allocator.free(0)
    assert allocator.segments() == ()
    assert allocator.reserved.peak == 0


def test_two_to_the_62_bytes_find_no_room_even_on_an_unlimited_device(make: Make) -> None:
    with pytest.raises(OutOfMemoryError, match=r"4194304\.0 TiB: .*0 B"):
        make().allocate(2**62)


def test_a_second_free_is_refused(make: Make) -> None:
    allocator = make()
    address = allocator.allocate(1000)
    allocator.free(address)
    with pytest.raises(RequestError, match=f"{address:#x}: .*freed before"):
        allocator.free(address)
    allocator.check_integrity()


def test_freeing_an_address_inside_a_block_is_refused(make: Make) -> None:
    allocator = make()
    address = allocator.allocate(5000)
    with pytest.raises(RequestError, match="nothing is allocated"):
        allocator.free(address + 512)
    allocator.free(address)


def test_a_negative_size_is_refused(make: Make) -> None:
    with pytest.raises(RequestError, match="cannot allocate -1 bytes"):
        make().allocate(-1)


def test_a_negative_capacity_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="-1 bytes"):
        allocator_named(name, capacity_bytes=-1)


def test_the_settings_of_another_allocator_are_refused(make: Make, name: str) -> None:
    wrong = CachingConfig() if name == "cnmem" else CnmemConfig()
    with pytest.raises(RequestError, match=f"{name} .*Config, .*{type(wrong).__name__}"):
        make(wrong)


def test_when_memory_runs_out_the_message_says_who_holds_what(make: Make, name: str) -> None:
    allocator = make(capacity_bytes=30 * MIB)
    allocator.allocate(16 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(25 * MIB)
    reserved = allocator.reserved.now
    assert str(caught.value).startswith(
        f"the {name} allocator finds no room for 25.0 MiB: of the device of 30.0 MiB it holds"
    )
    assert (caught.value.requested_bytes, caught.value.reserved_bytes) == (25 * MIB, reserved)
    allocator.check_integrity()


def test_a_freed_block_is_used_again(make: Make) -> None:
    allocator = make()
    first = allocator.allocate(3 * MIB)
    allocator.free(first)
    before = allocator.reserved.now
    assert allocator.allocate(3 * MIB) == first
    assert allocator.reserved.now == before


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(RequestError, match=r"'pytorhc'; .*'pytorch'\? .*buddy"):
        allocator_named("pytorhc")


def test_every_allocator_says_what_it_is_and_where_its_rules_come_from() -> None:
    assert list(ALLOCATORS) == [
        *("best-fit", "buddy", "chainer", "chunked", "cnmem", "gtbm", "mxnet", "planned", "pytorch", "tensorflow")
    ]
    for allocator in ALLOCATORS.values():
        assert allocator.summary
        assert "." in allocator.source


def test_the_peaks_remember_the_call_of_the_first_maximum(make: Make) -> None:
    allocator = make()
    r = random.Random(0)
    addresses = [allocator.allocate(r.randrange(1, MIB)) for _ in range(10)]
    peak = allocator.requested.peak
    for address in addresses:
        allocator.free(address)
    assert (allocator.requested.peak, allocator.requested.peak_at, allocator.requested.now) == (peak, 9, 0)


def tampered(make_damage: Callable[[CachingAllocator], object]) -> str:
    """What the integrity check says after the damage."""
    allocator = CachingAllocator()
    first = allocator.allocate(4 * MIB)
    allocator.allocate(4 * MIB)
    allocator.free(first)
    allocator.check_integrity()
    make_damage(allocator)
    with pytest.raises(InvalidLayoutError) as caught:
        allocator.check_integrity()
    return str(caught.value)


def test_the_integrity_check_names_the_equation_that_failed() -> None:
    assert tampered(lambda a: a.reserved.add(1, 0)) == "pytorch: sum of segments 20971520 != reserved 20971521"
    assert tampered(lambda a: a.allocated.add(-1, 0)) == "pytorch: sum of live blocks 4194304 != allocated 4194303"
    assert tampered(lambda a: a.requested.add(2, 0)) == "pytorch: sum of requests 4194304 != requested 4194306"
    assert tampered(lambda a: a.segment_log.clear()) == "pytorch: sum of the segment log 0 != reserved 20971520"


def test_the_integrity_check_finds_wrong_neighbours() -> None:
    def move(allocator: CachingAllocator) -> None:
        block = next(iter(allocator._live.values()))
        allocator._live[block.address + 512] = allocator._live.pop(block.address)
        block.address += 512

    def cut(allocator: CachingAllocator) -> None:
        block = next(iter(allocator._large.free))
        allocator._large.free.remove(allocator.key(block))
        allocator.put(block.cut(MIB))
        allocator.put(block)

    def forget(allocator: CachingAllocator) -> None:
        block = next(iter(allocator._large.free))
        allocator._large.free.remove(allocator.key(block))

    assert tampered(move) == f"pytorch: start of block {6 * MIB + 512} != end of the one before {6 * MIB}"
    assert tampered(cut) == f"pytorch: two free neighbours meet at {3 * MIB}"
    assert "blocks in segments" in tampered(forget)
