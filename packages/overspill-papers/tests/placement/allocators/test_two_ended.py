"""Dymem's GTBM: the two ends of its pool, the incremental space, and how the pool is sized (HPDC'20, §3.3 and §5.5)."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import Block, Mobility, Trace
from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import ALLOCATE, FREE, Events, allocator_named, layout_of, minimum_capacity, replay
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.two_ended import TwoEndedConfig, needed_pool_bytes
from overspill_papers.placement import CnmemConfig, size_pool

MIB = 1 << 20
MOVABLE, TEMPORARY, RECLAIMED = Mobility
Make = Callable[..., Allocator]


@pytest.fixture
def make() -> Make:
    def build(name: str, config: Any = None, capacity_mib: int | None = None) -> Allocator:
        capacity = None if capacity_mib is None else capacity_mib * MIB
        return allocator_named(name, config, capacity_bytes=capacity)

    return build


def pool_of(mib: int, *, grows: bool = True) -> TwoEndedConfig:
    return TwoEndedConfig(mib * MIB, grows=grows)


def events_of(*rows: tuple[int, int, int, Mobility] | tuple[int, int]) -> Events:
    """Events from `(ALLOCATE, block, MiB, mobility)` or `(FREE, block)`."""
    return Events.from_rows(
        [(row[0], row[1], row[2] * MIB if len(row) == 4 else 0, 0) for row in rows],
        [row[3] if len(row) == 4 else MOVABLE for row in rows],
    )


def growing(*peaks_mib: int) -> list[Events]:
    """Iterations that each need a main space of so many MiB."""
    return [events_of((ALLOCATE, 0, peak, MOVABLE), (FREE, 0)) for peak in peaks_mib]


def test_figure_6_what_lies_apart_does_not_coalesce(make: Make) -> None:
    # 512, 512 and 1024 MB are allocated, the first and the last are freed: 1536 MB are free, in two regions.
    allocator = make("cnmem", CnmemConfig(pool_bytes=2048 * MIB, grows=False))
    blocks = [allocator.allocate(n * MIB) for n in (512, 512, 1024)]
    for i in (0, 2):
        allocator.free(blocks[i])
    (segment,) = allocator.segments()
    assert [(block.nbytes // MIB, block.state) for block in segment.blocks] == [
        (512, "free"),
        (512, "live"),
        (1024, "free"),
    ]
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1025 * MIB)


@pytest.mark.parametrize(("name", "fits"), [("cnmem", False), ("gtbm", True)])
def test_figure_7_the_tensor_that_four_layers_need_does_not_part_the_free_ones(
    make: Make, name: str, fits: bool
) -> None:
    # 200 and 300 MB are freed on both sides of a tensor with four references; then 400 are requested.
    config = pool_of(600, grows=False) if name == "gtbm" else CnmemConfig(pool_bytes=600 * MIB, grows=False)
    allocator = make(name, config)
    first = allocator.allocate(200 * MIB)
    allocator.allocate(100 * MIB, mobility=TEMPORARY)
    second = allocator.allocate(300 * MIB)
    allocator.free(first)
    allocator.free(second)
    if fits:
        assert allocator.allocate(400 * MIB) == first
    else:
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(400 * MIB)


def test_movable_blocks_start_at_the_low_end_and_temporary_ones_at_the_high_end(make: Make) -> None:
    allocator = make("gtbm", pool_of(100))
    low = [allocator.allocate(10 * MIB) for _ in range(2)]
    high = [allocator.allocate(5 * MIB, mobility=TEMPORARY) for _ in range(2)]
    start = low[0]
    assert [(a - start) // MIB for a in (*low, *high)] == [0, 10, 95, 90]
    assert allocator.spread_bytes == 30 * MIB


def test_each_end_fills_its_own_holes_first_the_smallest_and_furthest_from_the_gap(make: Make) -> None:
    allocator = make("gtbm", pool_of(100))
    low = [allocator.allocate(n * MIB) for n in (3, 1, 2, 1, 2, 1)]
    high = [allocator.allocate(n * MIB, mobility=TEMPORARY) for n in (3, 1, 2, 1, 2, 1)]
    for i in (0, 2, 4):
        allocator.free(low[i])
        allocator.free(high[i])
    assert allocator.allocate(2 * MIB) == low[2]
    assert allocator.allocate(MIB, mobility=TEMPORARY) == high[2] + MIB  # the upper part of the hole
    assert allocator.allocate(4 * MIB) == low[5] + MIB  # the gap
    allocator.check_integrity()


def test_an_end_without_room_takes_holes_of_the_other_before_the_device_is_asked(make: Make) -> None:
    allocator = make("gtbm", pool_of(20))
    high = [allocator.allocate(n * MIB, mobility=TEMPORARY) for n in (5, 5)]
    allocator.allocate(8 * MIB)
    allocator.free(high[0])
    assert allocator.allocate(4 * MIB) == high[0] + MIB
    allocator.allocate(4 * MIB)  # neither the gap of 2 MiB nor the rest of the hole has room
    assert [event.nbytes // MIB for event in allocator.segment_log] == [20, 4]


def test_reclaimed_blocks_have_segments_of_their_own_which_go_back(make: Make) -> None:
    allocator = make("gtbm", pool_of(20))
    block = allocator.allocate(3 * MIB, mobility=RECLAIMED)
    allocator.free(block)
    assert [(event.action, event.nbytes // MIB) for event in allocator.segment_log] == [
        ("segment_alloc", 20),
        ("segment_alloc", 3),
        ("segment_free", 3),
    ]


def test_a_reclaimed_block_without_room_beside_the_pool_goes_to_its_low_end(make: Make) -> None:
    allocator = make("gtbm", pool_of(20), 20)
    first = allocator.allocate(2 * MIB, mobility=RECLAIMED)
    assert allocator.allocate(2 * MIB) == first + 2 * MIB


def test_a_pool_that_does_not_grow_is_full_when_its_ends_meet(make: Make) -> None:
    allocator = make("gtbm", pool_of(20, grows=False))
    allocator.allocate(12 * MIB)
    last = allocator.allocate(8 * MIB, mobility=TEMPORARY)
    assert allocator.spread_bytes == allocator.reserved.now == 20 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1)
    allocator.free(last)
    assert allocator.spread_bytes == 12 * MIB


def test_blocks_freed_against_their_order_leave_no_holes(make: Make) -> None:
    # §3.3.3: those that more layers need come first at the high end, and go last.
    allocator = make("gtbm", pool_of(100))
    blocks = [allocator.allocate(n * MIB, mobility=TEMPORARY) for n in (4, 3, 2, 1)]
    for block, left in zip(reversed(blocks), (9, 7, 4, 0), strict=True):
        allocator.free(block)
        assert allocator.spread_bytes == left * MIB


def test_a_pool_larger_than_the_device_is_all_of_it(make: Make) -> None:
    allocator = make("gtbm", pool_of(1000), 31)
    allocator.allocate(1)
    assert allocator.reserved.now == 30 * MIB


def test_the_first_pool_is_10_of_12_gb(make: Make) -> None:
    allocator = make("gtbm", None, 12 << 10)
    allocator.allocate(1)
    assert allocator.reserved.now == 10 << 30


def test_the_main_space_shrinks_by_the_smallest_gap_between_its_ends() -> None:
    # The ends are 30 + 20, then 10 + 45, then 40 + 0 MiB of the pool: the smallest gap leaves 55.
    events = events_of(
        (ALLOCATE, 0, 10, MOVABLE), (ALLOCATE, 1, 20, MOVABLE), (ALLOCATE, 2, 20, TEMPORARY), (FREE, 1),
        (ALLOCATE, 3, 25, TEMPORARY), (FREE, 3), (FREE, 2), (ALLOCATE, 4, 30, MOVABLE), (FREE, 4), (FREE, 0),
    )  # fmt: skip
    profile = replay(events, "gtbm", config=pool_of(1000), request_bytes=0)
    assert needed_pool_bytes(profile) == 55 * MIB
    assert replay(events, "gtbm").peak_reserved_bytes == 355 * MIB  # with a β of 300
    assert minimum_capacity(events, "gtbm") == 56 * MIB  # whole pages
    assert replay(events, "gtbm", config=pool_of(55, grows=False)).fits
    assert not replay(events, "gtbm", config=pool_of(54, grows=False)).fits


def test_without_the_curves_no_gap_is_known() -> None:
    with pytest.raises(RequestError, match="replay with request_bytes"):
        needed_pool_bytes(replay(growing(1)[0], "gtbm", config=pool_of(10)))


@pytest.mark.parametrize(
    ("beta", "pools"), [(100, [1100, 1200, 1200, 1300, 1300]), (300, [1300] * 5), (500, [1500] * 5)]
)
def test_table_2_an_iteration_that_fails_gets_another_beta(beta: int, pools: list[int]) -> None:
    found = size_pool(growing(1000, 1010, 1150, 1000, 1210, 1180), beta_bytes=beta * MIB)
    assert [nbytes // MIB for nbytes in found.pool_bytes] == [10 << 10, *pools]
    assert found.failures == (pools[-1] - pools[0]) // beta
    assert found.failure_rate == found.failures / (6 + found.failures)


def test_table_2_training_fails_less_often_with_a_larger_beta() -> None:
    r = random.Random(0)
    iterations = growing(*(int(r.gauss(3000, 70)) for _ in range(400)))
    rates = [size_pool(iterations, beta_bytes=n * MIB).failure_rate for n in (100, 300, 500)]
    assert rates[0] > rates[2] == 0
    assert rates == sorted(rates, reverse=True)


def test_a_pool_cannot_be_sized_by_nothing_or_for_more_than_the_device() -> None:
    with pytest.raises(RequestError, match="at least one"):
        size_pool([])
    with pytest.raises(OutOfMemoryError, match=r"10\.0 GiB"):
        size_pool(growing(11 << 10))
    with pytest.raises(OutOfMemoryError, match=r"2\.0 GiB .*1000\.0 MiB"):
        size_pool(growing(500, 2000), capacity_bytes=1000 * MIB)
    with pytest.raises(OutOfMemoryError, match="main space"):
        size_pool([growing(500)[0], Events.from_rows([(ALLOCATE, 0, 1 << 60, 0)])])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RequestError, match="pool_bytes"):
        TwoEndedConfig(-1)
    with pytest.raises(RequestError, match="beta_bytes"):
        TwoEndedConfig(beta_bytes=-1)


def test_the_hints_of_a_trace_reach_the_allocator() -> None:
    trace = Trace((Block(0, 0, 3, 5 * MIB), Block(1, 1, 4, 5 * MIB, mobility=TEMPORARY)))
    events = Events.of(trace)
    assert events.mobility.tolist() == [0, 1, 0, 1]
    layout = layout_of(trace, "gtbm", pool_of(100))
    layout.validate(trace)
    assert layout.offsets == (0, 95 * MIB)
    with pytest.raises(RequestError, match="mobility"):
        Events.from_rows([(ALLOCATE, 0, 1, 0)], [3])


def test_what_more_layers_need_is_allocated_first_of_a_row() -> None:
    blocks = [
        Block(0, 0, 1, 4 * MIB, "workspace", mobility=TEMPORARY),
        Block(1, 0, 3, 2 * MIB, "branch", mobility=TEMPORARY, references=1),
        Block(2, 0, 5, 8 * MIB, "fork", mobility=TEMPORARY, references=4),
        Block(3, 2, 4, 5 * MIB, "later", mobility=TEMPORARY, references=9),
    ]
    trace = Trace(tuple(blocks))
    assert Events.of(trace).block.tolist() == [0, 1, 2, 0, 3, 1, 3, 2]
    events = Events.of(trace, by_references=True)
    assert events.block.tolist() == [2, 1, 0, 0, 3, 1, 3, 2]
    # The high end is then a stack: the workspace goes first, and what comes next takes its place.
    pool = TwoEndedConfig(1000 * MIB)
    for ordered, used in ((events, 15), (Events.of(trace), 19)):
        done = replay(ordered, "gtbm", config=pool, request_bytes=0)
        assert done.spread is not None
        assert int(done.spread.max()) == used * MIB


def sides(allocator: Allocator, high: set[int]) -> list[bool]:
    """For each live block of the main space, by address, whether it is one of the `high` ones."""
    blocks = allocator.segments()[0].blocks
    return [block.address in high for block in blocks if block.state == "live"]


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=40))
def test_in_a_large_pool_the_ends_never_mix(steps: Sequence[tuple[bool, bool, int, int]]) -> None:
    allocator = allocator_named("gtbm", pool_of(1000))
    live: list[int] = []
    high: set[int] = set()
    for allocates, temporary, mib, which in steps:
        if allocates or not live:
            live.append(allocator.allocate(mib * MIB, mobility=TEMPORARY if temporary else MOVABLE))
            if temporary:
                high.add(live[-1])
        else:
            address = live.pop(which % len(live))
            allocator.free(address)
            high.discard(address)
        allocator.check_integrity()
        found = sides(allocator, high)
        assert found == sorted(found)
        assert allocator.spread_bytes >= allocator.allocated.now


def test_a_linear_network_falls_back_to_best_fit() -> None:
    # §5.1: where all blocks are movable, it is CNMeM's pool.
    r = random.Random(1)
    sizes = [r.randrange(1, 9) for _ in range(60)]
    trace = Trace(tuple(Block(i, i, i + r.randrange(1, 20), n * MIB) for i, n in enumerate(sizes)))
    pool = sum(sizes) * MIB
    ours = layout_of(trace, "gtbm", TwoEndedConfig(pool))
    theirs = layout_of(trace, "cnmem", CnmemConfig(pool))
    assert ours.offsets == theirs.offsets
