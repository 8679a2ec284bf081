"""PyTorch's caching allocator, rule by rule, with cases worked out by hand from c10/cuda/CUDACachingAllocator.cpp."""

from typing import Any

import pytest
from tests.placement.allocators import caching_oracle
from tests.placement.allocators.caching_oracle import segment_size

from overspill.core.errors import OutOfMemoryError
from overspill.placement import ALLOCATORS, CachingConfig
from overspill.placement.allocators.base import Allocator, SegmentView
from overspill.placement.allocators.caching import round_size

MIB = 1 << 20
EXPANDABLE = CachingConfig(expandable_segments=True)


@pytest.fixture(params=[ALLOCATORS["pytorch"], caching_oracle.CachingAllocator], ids=["native", "oracle"])
def make(request: pytest.FixtureRequest) -> Any:
    def build(capacity_mib: int | None = None, **settings: Any) -> Allocator:
        capacity = None if capacity_mib is None else capacity_mib * MIB
        return request.param(CachingConfig(**settings), capacity_bytes=capacity)

    return build


def shape(segment: SegmentView) -> list[tuple[str, int]]:
    """State and size of each block."""
    return [(block.state, block.nbytes) for block in segment.blocks]


def log(allocator: Allocator) -> list[tuple[str, int]]:
    """Action and MiB of each exchange with the device."""
    return [(event.action, event.nbytes // MIB) for event in allocator.segment_log]


def every(divisions: int) -> tuple[int, ...]:
    return (divisions,) * 16


@pytest.mark.parametrize(
    ("nbytes", "divisions", "size"),
    [
        (1, 0, 512),
        (511, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200, 0, 1536),
        (1200, 1, 1536),
        (1200, 2, 1536),  # above 512 * 2: a multiple of 1024 / 2
        (1025, 2, 1536),
        (2048, 4, 2048),
        (2049, 4, 2560),  # above 512 * 4: a multiple of 2048 / 4
        (1200, 4, 1536),  # not above 512 * 4: rounded to 512
        (5 * MIB, 4, 5 * MIB),
        (5 * MIB + 1, 4, 6 * MIB),
        (7 * MIB + 1, 4, 8 * MIB),
        (8 * MIB, 4, 8 * MIB),
        (2**40 + 1, 2, 3 * 2**39),
    ],
)
def test_sizes_are_rounded_to_512_bytes_or_to_a_division_of_a_power_of_two(
    nbytes: int, divisions: int, size: int, make: Any
) -> None:
    assert round_size(nbytes, every(divisions)) == size
    allocator = make(roundup_power2_divisions=every(divisions))
    allocator.allocate(nbytes)
    live = [b.nbytes for s in allocator.segments() for b in s.blocks if b.state == "live"]
    assert live == [size] or size > MIB  # a large block may keep up to 1 MiB more


def test_each_power_of_two_from_1_mib_has_its_own_divisions() -> None:
    table = (1, 2, 4, 8, *(0,) * 11, 16)
    assert round_size(3 * MIB // 4, table) == 3 * MIB // 4  # below 1 MiB the first interval counts
    assert round_size(2 * MIB + 1, table) == 3 * MIB
    assert round_size(4 * MIB + 1, table) == 5 * MIB
    assert round_size(8 * MIB + 1, table) == 9 * MIB
    assert round_size(16 * MIB + 1, table) == 16 * MIB + 512
    assert round_size(2**40 + 1, table) == 2**40 + 2**36  # above 64 GiB the last


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_a_new_segment_is_2_mib_or_20_mib_or_whole_2_mib(size: int, segment: int, make: Any) -> None:
    assert segment_size(size, 20 * MIB) == segment
    allocator = make()
    allocator.allocate(size)
    assert allocator.reserved.now == segment


def test_the_size_of_large_segments_can_be_set(make: Any) -> None:
    allocator = make(large_segment_bytes=32 * MIB)
    allocator.allocate(5 * MIB)
    assert log(allocator) == [("segment_alloc", 32)]


def test_small_and_large_blocks_come_from_different_pools(make: Any) -> None:
    allocator = make()
    allocator.free(allocator.allocate(5 * MIB))  # 20 MiB cached in the large pool
    allocator.allocate(MIB)
    assert log(allocator) == [("segment_alloc", 20), ("segment_alloc", 2)]


def test_the_smallest_free_block_that_fits_is_taken(make: Any) -> None:
    allocator = make()
    blocks = [allocator.allocate(n * MIB) for n in (30, 14, 20)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(12 * MIB) == blocks[1]
    assert allocator.allocate(19 * MIB) == blocks[2]
    assert allocator.allocate(19 * MIB) == blocks[0]


def test_a_block_is_only_used_again_on_its_stream(make: Any) -> None:
    allocator = make()
    first = allocator.allocate(12 * MIB, 1)
    allocator.free(first)
    assert allocator.allocate(12 * MIB, 0) != first
    assert allocator.allocate(12 * MIB, 2) != first
    assert allocator.allocate(12 * MIB, 1) == first


@pytest.mark.parametrize(("tie_break", "taken"), [("address", "young"), ("oldest", "old"), ("falling", "old")])
def test_among_equal_blocks_the_lowest_is_taken_or_the_one_created_first_or_the_higher_segment(
    tie_break: str, taken: str, make: Any
) -> None:
    allocator = make(capacity_mib=48, tie_break=tie_break)
    lowest, old = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(lowest)
    allocator.free(allocator.allocate(28 * MIB, 1))  # no room: the lowest segment goes back
    young = allocator.allocate(20 * MIB)  # no room either: that of the other stream goes back
    assert young == lowest < old
    allocator.free(old)
    allocator.free(young)
    assert allocator.allocate(20 * MIB) == {"young": young, "old": old}[taken]


def test_a_small_block_is_split_when_512_bytes_remain(make: Any) -> None:
    allocator = make()
    allocator.allocate(512)
    (segment,) = allocator.segments()
    assert shape(segment) == [("live", 512), ("free", 2 * MIB - 512)]
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)
    (segment,) = allocator.segments()
    assert shape(segment) == [("live", 512), ("live", MIB), ("live", MIB - 512)]


def test_a_large_block_is_split_only_when_more_than_1_mib_remains(make: Any) -> None:
    allocator = make()
    allocator.allocate(19 * MIB)  # 20 MiB: 1 MiB stays with it
    assert allocator.allocated.now == 20 * MIB
    assert allocator.requested.now == 19 * MIB
    allocator.allocate(9 * MIB)  # of 20 MiB: 11 MiB are split off
    allocator.free(allocator.allocate(10 * MIB + 512))  # of those 11: less than 1 MiB remains
    assert allocator.allocated.peak == 20 * MIB + 9 * MIB + 11 * MIB
    assert log(allocator) == [("segment_alloc", 20), ("segment_alloc", 20)]


def test_the_front_is_split_off_and_the_rest_stays_free(make: Any) -> None:
    allocator = make()
    first = allocator.allocate(3 * MIB)
    assert allocator.allocate(4 * MIB) == first + 3 * MIB
    assert shape(allocator.segments()[0]) == [("live", 3 * MIB), ("live", 4 * MIB), ("free", 13 * MIB)]


def test_free_neighbours_are_joined_on_both_sides(make: Any) -> None:
    allocator = make()
    a, b, c = (allocator.allocate(4 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    assert shape(allocator.segments()[0]) == [("free", 4 * MIB), ("live", 4 * MIB), ("free", 12 * MIB)]
    allocator.free(b)
    assert shape(allocator.segments()[0]) == [("free", 20 * MIB)]


def test_segments_are_never_joined(make: Any) -> None:
    allocator = make()
    blocks = [allocator.allocate(10 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    assert [shape(segment) for segment in allocator.segments()] == [[("free", 10 * MIB)], [("free", 10 * MIB)]]


def test_freeing_keeps_the_segment(make: Any) -> None:
    allocator = make()
    allocator.free(allocator.allocate(50 * MIB))
    assert allocator.reserved.now == 50 * MIB


def test_without_room_all_unsplit_segments_go_back_the_large_ones_first(make: Any) -> None:
    allocator = make(capacity_mib=60)
    small = allocator.allocate(MIB)
    blocks = [allocator.allocate(n * MIB) for n in (20, 16)]
    split = allocator.allocate(4 * MIB)  # of 20 MiB: stays, for it is in use
    for block in (small, *blocks):
        allocator.free(block)
    allocator.allocate(30 * MIB)
    freed = [n for action, n in log(allocator) if action == "segment_free"]
    assert freed == [16, 20, 2]  # by size, then the small pool
    assert allocator.retries == 1
    assert allocator.reserved.now == 20 * MIB + 30 * MIB
    allocator.free(split)


def test_a_split_segment_cannot_go_back(make: Any) -> None:
    allocator = make(capacity_mib=40)
    allocator.allocate(2 * MIB)  # pins 20 MiB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(22 * MIB)
    assert allocator.reserved.now == 20 * MIB
    assert allocator.retries == 1


def test_a_failed_allocation_leaves_the_statistics_of_live_blocks_alone(make: Any) -> None:
    allocator = make(capacity_mib=10)
    allocator.allocate(10 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1)
    assert (allocator.requested.now, allocator.allocated.now) == (10 * MIB, 10 * MIB)
    allocator.check_integrity()


def test_a_block_of_the_split_limit_serves_no_smaller_request(make: Any) -> None:
    allocator = make(max_split_bytes=40 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(38 * MIB)
    assert log(allocator) == [("segment_alloc", 40), ("segment_alloc", 38)]


def test_a_request_of_the_split_limit_takes_a_block_up_to_the_rounding_larger(make: Any) -> None:
    allocator = make(max_split_bytes=40 * MIB)
    large = allocator.allocate(70 * MIB)
    allocator.free(large)
    other = allocator.allocate(50 * MIB)  # 70 is not below 50 + 20
    assert other != large
    assert allocator.allocate(51 * MIB) == large
    assert allocator.allocated.now == 50 * MIB + 70 * MIB  # never split


def test_the_rounding_of_unsplit_blocks_can_be_set(make: Any) -> None:
    allocator = make(max_split_bytes=40 * MIB, max_non_split_rounding_bytes=30 * MIB)
    large = allocator.allocate(70 * MIB)
    allocator.free(large)
    assert allocator.allocate(42 * MIB) == large


def test_without_room_one_oversize_block_that_is_large_enough_goes_back_first(make: Any) -> None:
    allocator = make(capacity_mib=150, max_split_bytes=20 * MIB)
    blocks = [allocator.allocate(n * MIB) for n in (70, 40, 12)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(46 * MIB)  # 70 is too much larger for it, and goes
    assert log(allocator)[3:] == [("segment_free", 70), ("segment_alloc", 46)]
    assert allocator.retries == 0


def test_without_a_single_oversize_block_the_largest_go_back_until_they_suffice(make: Any) -> None:
    allocator = make(capacity_mib=150, max_split_bytes=20 * MIB)
    blocks = [allocator.allocate(n * MIB) for n in (30, 50, 40, 12)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(80 * MIB)
    assert log(allocator)[4:] == [("segment_free", 50), ("segment_free", 40), ("segment_alloc", 80)]
    assert allocator.retries == 0


def test_when_oversize_blocks_do_not_suffice_everything_goes_back(make: Any) -> None:
    allocator = make(capacity_mib=100, max_split_bytes=20 * MIB)
    for block in [allocator.allocate(n * MIB) for n in (30, 12)]:
        allocator.free(block)
    allocator.allocate(90 * MIB)
    assert log(allocator)[2:] == [("segment_free", 30), ("segment_free", 12), ("segment_alloc", 90)]
    assert allocator.retries == 1


def test_a_share_of_the_device_is_a_limit(make: Any) -> None:
    allocator = make(capacity_mib=100, per_process_memory_fraction=0.5)
    allocator.allocate(50 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(1)


def test_garbage_is_collected_only_with_a_limit_below_the_device(make: Any) -> None:
    allocator = make(capacity_mib=200, garbage_collection_threshold=0.1)
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(52 * MIB)
    assert log(allocator) == [("segment_alloc", 50), ("segment_alloc", 52)]
    limited = make(capacity_mib=200, garbage_collection_threshold=0.1, per_process_memory_fraction=0.9)
    limited.free(limited.allocate(50 * MIB))
    limited.allocate(52 * MIB)
    assert log(limited) == [("segment_alloc", 50), ("segment_free", 50), ("segment_alloc", 52)]


def test_garbage_collection_leaves_split_segments(make: Any) -> None:
    # The limit is 160 MiB and the threshold 80.
    allocator = make(capacity_mib=200, per_process_memory_fraction=0.8, garbage_collection_threshold=0.5)
    large, small = allocator.allocate(60 * MIB), allocator.allocate(22 * MIB)
    allocator.free(large)
    allocator.allocate(12 * MIB)  # splits the 60: 12 + 48
    allocator.free(small)
    allocator.allocate(90 * MIB)
    assert log(allocator)[2:] == [("segment_free", 22), ("segment_alloc", 90)]


def test_garbage_collection_takes_blocks_of_at_least_average_age_until_the_threshold_is_met(make: Any) -> None:
    allocator = make(capacity_mib=1000, per_process_memory_fraction=0.5, garbage_collection_threshold=0.1)
    blocks = [allocator.allocate(n * MIB) for n in (20, 24)]
    allocator.free(blocks[0])
    allocator.allocate(26 * MIB)  # 44 MiB are below the threshold of 50: nothing goes; the 20 MiB age by one
    allocator.free(blocks[1])
    allocator.allocate(28 * MIB)  # 70 MiB: the mean age of 2 and 1 is 1.5, and the 20 MiB reach the target of 20
    freed = [n for action, n in log(allocator) if action == "segment_free"]
    assert freed == [20]


def test_an_expandable_segment_grows_by_pages(make: Any) -> None:
    allocator = make(expandable_segments=True)
    first = allocator.allocate(15 * MIB)
    assert log(allocator) == [("segment_map", 20)]
    second = allocator.allocate(15 * MIB)  # uses the 5 MiB that are left
    assert second == first + 15 * MIB
    assert log(allocator) == [("segment_map", 20), ("segment_map", 20)]
    (segment,) = allocator.segments()
    assert shape(segment)[:3] == [("live", 15 * MIB), ("live", 15 * MIB), ("free", 10 * MIB)]


def test_small_expandable_segments_have_pages_of_2_mib(make: Any) -> None:
    allocator = make(expandable_segments=True)
    for _ in range(3):
        allocator.allocate(MIB)
    assert log(allocator) == [("segment_map", 2), ("segment_map", 2)]


def test_a_large_block_of_an_expandable_segment_keeps_no_slack(make: Any) -> None:
    allocator = make(expandable_segments=True)
    allocator.allocate(19 * MIB + 512 * 1024)
    assert allocator.allocated.now == 19 * MIB + 512 * 1024


def test_each_stream_has_its_own_expandable_segment(make: Any) -> None:
    allocator = make(expandable_segments=True)
    allocator.allocate(2 * MIB, 0)
    allocator.allocate(2 * MIB, 1)
    assert [segment.stream for segment in allocator.segments()] == [0, 1]


def test_an_expandable_segment_spans_nine_eighths_of_the_device(make: Any) -> None:
    allocator = make(capacity_mib=160, expandable_segments=True)
    allocator.allocate(2 * MIB)
    (segment,) = allocator.segments()
    assert segment.nbytes == 180 * MIB
    assert segment.mapped_bytes == 20 * MIB


def test_without_room_only_whole_pages_inside_free_blocks_are_unmapped(make: Any) -> None:
    allocator = make(capacity_mib=100, expandable_segments=True)
    keep, gone, _ = (allocator.allocate(n * MIB) for n in (10, 70, 10))  # pages of 20 MiB: [0, 100)
    allocator.free(gone)  # [10, 80): the whole pages are [20, 80)
    allocator.allocate(2 * MIB, 1)
    assert log(allocator)[-2:] == [("segment_unmap", 60), ("segment_map", 20)]
    segment = allocator.segments()[0]
    assert shape(segment)[:4] == [("live", 10 * MIB), ("free", 10 * MIB), ("unmapped", 60 * MIB), ("live", 10 * MIB)]
    allocator.free(keep)
    allocator.check_integrity()


def test_the_lowest_unmapped_range_that_completes_the_request_is_mapped(make: Any) -> None:
    allocator = make(capacity_mib=120, expandable_segments=True)
    _, gone, _ = (allocator.allocate(n * MIB) for n in (10, 70, 10))
    allocator.free(gone)
    allocator.allocate(2 * MIB, 1)  # takes the last 20 MiB
    allocator.allocate(22 * MIB, 1)  # makes the 60 MiB in the middle unmapped, and needs 20 of them
    again = allocator.allocate(25 * MIB)  # 10 free before the gap, 20 mapped of it
    assert again == gone


def test_an_empty_expandable_segment_is_given_up(make: Any) -> None:
    allocator = make(capacity_mib=100, expandable_segments=True)
    allocator.free(allocator.allocate(90 * MIB))
    allocator.allocate(50 * MIB, 1)
    assert [segment.stream for segment in allocator.segments()] == [1]
    assert log(allocator) == [("segment_map", 100), ("segment_unmap", 100), ("segment_map", 60)]


def test_best_fit_counts_what_a_block_can_grow_to(make: Any) -> None:
    allocator = make(capacity_mib=1000, expandable_segments=True)
    a, _, c = (allocator.allocate(n * MIB) for n in (12, 2, 6))  # one page, all in use
    d = allocator.allocate(30 * MIB)  # [20, 50), and 10 MiB free at the end, which can grow
    allocator.free(a)  # 12 MiB that cannot grow
    allocator.free(c)
    # 10 MiB would fit best, but those are the end of the segment: the 12 MiB leave more to grow into.
    assert allocator.allocate(8 * MIB) == a
    allocator.free(d)
