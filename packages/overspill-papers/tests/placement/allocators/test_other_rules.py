"""The allocators of TensorFlow, MXNet, Chainer and CNMeM, rule by rule, with cases worked out by hand."""

from typing import Any

import pytest

from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import allocator_named
from overspill.placement.allocators.base import Allocator
from overspill_papers.placement import BfcConfig, ChainerConfig, CnmemConfig, MxnetConfig

MIB = 1 << 20


def make(name: str, capacity_mib: float | None = None, config: Any = None) -> Allocator:
    return allocator_named(name, config, capacity_bytes=None if capacity_mib is None else int(capacity_mib * MIB))


def log(allocator: Allocator) -> list[tuple[str, int]]:
    return [(event.action, event.nbytes) for event in allocator.segment_log]


def gained(allocator: Allocator) -> list[int]:
    return [event.nbytes // MIB for event in allocator.segment_log if event.action == "segment_alloc"]


def live(allocator: Allocator) -> list[int]:
    return [block.nbytes for segment in allocator.segments() for block in segment.blocks if block.state == "live"]


class TestTensorflow:
    def test_sizes_are_rounded_to_256_bytes(self) -> None:
        allocator = make("tensorflow")
        allocator.allocate(257)
        assert live(allocator) == [512]

    def test_regions_start_at_2_mib_and_double(self) -> None:
        allocator = make("tensorflow")
        for _ in range(4):
            allocator.allocate(2 * MIB)
        assert gained(allocator) == [2, 4, 8]

    def test_a_large_request_doubles_the_region_until_it_fits(self) -> None:
        allocator = make("tensorflow")
        allocator.allocate(10 * MIB)
        allocator.allocate(10 * MIB)  # the first one grew, so the next is as large
        allocator.allocate(10 * MIB)  # and the one after twice that
        assert gained(allocator) == [16, 16, 32]

    def test_a_region_is_at_most_what_is_left(self) -> None:
        allocator = make("tensorflow", 20)
        allocator.allocate(10 * MIB)
        allocator.allocate(4 * MIB)
        assert gained(allocator) == [16, 4]

    def test_without_growth_the_first_region_is_the_whole_device(self) -> None:
        allocator = make("tensorflow", 100, BfcConfig(allow_growth=False))
        allocator.allocate(1)
        assert gained(allocator) == [100]

    def test_without_growth_the_device_must_have_a_size(self) -> None:
        with pytest.raises((RequestError, ValueError), match="its capacity"):
            make("tensorflow", None, BfcConfig(allow_growth=False))

    def test_a_region_that_the_device_refuses_shrinks_by_a_tenth(self) -> None:
        allocator = make("tensorflow", 15)  # no whole pages, so 14 can be had
        allocator.allocate(9 * MIB)
        assert log(allocator) == [("segment_alloc", 14_155_776)]  # 15 MiB * 0.9, in single precision

    def test_a_chunk_is_split_when_it_is_twice_the_size(self) -> None:
        allocator = make("tensorflow")
        allocator.allocate(MIB)
        assert live(allocator) == [MIB]

    def test_a_chunk_below_twice_the_size_is_given_whole(self) -> None:
        allocator = make("tensorflow")
        allocator.allocate(MIB + 256)
        assert live(allocator) == [2 * MIB]

    def test_128_mib_are_never_wasted(self) -> None:
        allocator = make("tensorflow")
        allocator.allocate(384 * MIB)  # of 512: 128 remain
        assert live(allocator) == [384 * MIB]
        other = make("tensorflow")
        other.allocate(384 * MIB + 256)
        assert live(other) == [512 * MIB]

    def test_the_waste_can_be_a_share_of_the_device(self) -> None:
        allocator = make("tensorflow", 100, BfcConfig(fragmentation_fraction=0.01))
        allocator.allocate(3 * MIB)  # of 4 MiB, where 1 MiB may not be wasted
        assert live(allocator) == [3 * MIB]

    def test_streams_share_chunks(self) -> None:
        allocator = make("tensorflow")
        first = allocator.allocate(MIB, 1)
        allocator.free(first)
        assert allocator.allocate(MIB, 2) == first

    def test_without_room_regions_without_live_chunks_go_back(self) -> None:
        allocator = make("tensorflow", 40)
        allocator.free(allocator.allocate(16 * MIB))
        allocator.allocate(30 * MIB)
        assert [action for action, _ in log(allocator)] == ["segment_alloc", "segment_free", "segment_alloc"]
        assert allocator.retries == 1

    def test_regions_stay_without_garbage_collection(self) -> None:
        allocator = make("tensorflow", 40, BfcConfig(garbage_collection=False))
        allocator.free(allocator.allocate(16 * MIB))
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(30 * MIB)
        assert allocator.retries == 0

    def test_a_wrong_share_is_refused(self) -> None:
        with pytest.raises(RequestError, match="0 to 1"):
            BfcConfig(fragmentation_fraction=1.5)


class TestMxnet:
    def test_the_least_size_is_a_page_and_large_ones_are_whole_2_mib(self) -> None:
        allocator = make("mxnet")
        for nbytes in (1, 4097, 2 * MIB, 2 * MIB + 1):
            allocator.allocate(nbytes)
        assert sorted(live(allocator)) == [4096, 4097, 2 * MIB, 4 * MIB]

    @pytest.mark.parametrize(
        ("nbytes", "size"),
        [
            (1, 4096),
            (4097, 8192),
            (3 * MIB, 4 * MIB),
            (16 * MIB, 16 * MIB),
            (16 * MIB + 1, 32 * MIB),
            (33 * MIB, 48 * MIB),
        ],
    )
    def test_the_rounding_pool_has_powers_of_two_and_then_multiples_of_the_cutoff(self, nbytes: int, size: int) -> None:
        allocator = make("mxnet", None, MxnetConfig(pool_type="round"))
        allocator.allocate(nbytes)
        assert live(allocator) == [size]

    def test_a_block_serves_only_its_own_size(self) -> None:
        allocator = make("mxnet")
        first = allocator.allocate(8 * MIB)
        allocator.free(first)
        assert allocator.allocate(6 * MIB) != first
        assert allocator.allocate(7 * MIB) == first  # also 8 MiB

    def test_the_block_freed_last_is_taken_first(self) -> None:
        allocator = make("mxnet")
        blocks = [allocator.allocate(4096) for _ in range(3)]
        for i in (2, 0, 1):
            allocator.free(blocks[i])
        assert [allocator.allocate(4096) for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]

    def test_before_the_reserve_is_touched_all_free_blocks_go_back(self) -> None:
        allocator = make("mxnet", 100)
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(54 * MIB)  # 60 are free, of which 5 are reserved
        assert allocator.retries == 0
        allocator.allocate(2 * MIB)  # 6 are free
        assert allocator.retries == 1
        assert log(allocator)[2:] == [("segment_free", 40 * MIB), ("segment_alloc", 2 * MIB)]

    def test_the_reserve_itself_can_be_used(self) -> None:
        allocator = make("mxnet", 100)
        allocator.allocate(98 * MIB)
        allocator.allocate(2 * MIB)
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(1)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"pool_type": "other"}, "pool_type"),
            ({"page_bytes": 31}, "power of 2"),
            ({"large_round_bytes": 0}, "must be positive"),
            ({"linear_cutoff": 19}, "from 20 to 34"),
            ({"reserve_percent": 101}, "from 0 to 100"),
        ],
    )
    def test_wrong_settings_are_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            MxnetConfig(**settings)


class TestChainer:
    def test_sizes_are_rounded_to_512_bytes_and_segments_are_as_large(self) -> None:
        allocator = make("chainer")
        allocator.allocate(513)
        assert log(allocator) == [("segment_alloc", 1024)]

    def test_any_larger_block_is_split(self) -> None:
        allocator = make("chainer")
        first = allocator.allocate(4 * MIB)
        allocator.free(first)
        assert allocator.allocate(512) == first
        assert allocator.allocate(MIB) == first + 512
        assert gained(allocator) == [4]

    def test_the_smallest_bin_is_taken(self) -> None:
        allocator = make("chainer")
        blocks = [allocator.allocate(n * MIB) for n in (8, 4, 6)]
        for block in blocks:
            allocator.free(block)
        assert allocator.allocate(5 * MIB) == blocks[2]

    def test_streams_do_not_share_blocks(self) -> None:
        allocator = make("chainer")
        first = allocator.allocate(MIB, 1)
        allocator.free(first)
        assert allocator.allocate(MIB, 0) != first

    def test_without_room_unsplit_segments_go_back(self) -> None:
        allocator = make("chainer", 20)
        first, second = allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)
        allocator.free(first)
        allocator.free(second)
        allocator.allocate(MIB)  # splits one of them
        allocator.allocate(12 * MIB)
        assert [action for action, _ in log(allocator)][2:] == ["segment_free", "segment_alloc"]
        assert allocator.retries == 1

    def test_at_its_limit_the_pool_fails_without_giving_blocks_back(self) -> None:
        allocator = make("chainer", None, ChainerConfig(limit_bytes=10 * MIB))
        allocator.free(allocator.allocate(8 * MIB))
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(9 * MIB)
        assert allocator.reserved.now == 8 * MIB
        assert allocator.retries == 0

    def test_a_negative_limit_is_refused(self) -> None:
        with pytest.raises(RequestError, match="negative"):
            ChainerConfig(limit_bytes=-1)


class TestCnmem:
    def test_blocks_come_from_one_reserved_pool(self) -> None:
        allocator = make("cnmem", None, CnmemConfig(pool_bytes=10 * MIB))
        first = allocator.allocate(1)
        assert allocator.allocate(5 * MIB) == first + 512
        assert log(allocator) == [("segment_alloc", 10 * MIB)]

    def test_the_smallest_hole_that_fits_is_taken_the_lowest_among_equals(self) -> None:
        allocator = make("cnmem", None, CnmemConfig(pool_bytes=100 * MIB))
        blocks = [allocator.allocate(n * MIB) for n in (5, 1, 3, 1, 3, 1)]
        for i in (0, 4, 2):
            allocator.free(blocks[i])
        assert allocator.allocate(2 * MIB) == blocks[2]
        assert allocator.allocate(3 * MIB) == blocks[4]

    def test_a_full_pool_grows_by_exactly_the_request(self) -> None:
        allocator = make("cnmem", None, CnmemConfig(pool_bytes=4 * MIB))
        allocator.allocate(3 * MIB)
        allocator.allocate(6 * MIB)
        assert gained(allocator) == [4, 6]

    def test_a_fixed_pool_does_not_grow(self) -> None:
        allocator = make("cnmem", None, CnmemConfig(pool_bytes=4 * MIB, grows=False))
        allocator.allocate(3 * MIB)
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(2 * MIB)

    def test_nothing_ever_goes_back(self) -> None:
        allocator = make("cnmem", 20)
        allocator.free(allocator.allocate(12 * MIB))
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(14 * MIB)
        assert allocator.reserved.now == 12 * MIB

    def test_a_pool_larger_than_the_device_fails_at_the_first_allocation(self) -> None:
        allocator = make("cnmem", 20, CnmemConfig(pool_bytes=30 * MIB))
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(1)

    def test_a_pool_that_can_serve_nothing_is_refused(self) -> None:
        with pytest.raises(RequestError, match="serves nothing"):
            CnmemConfig(grows=False)
        with pytest.raises(RequestError, match="negative"):
            CnmemConfig(pool_bytes=-1)
