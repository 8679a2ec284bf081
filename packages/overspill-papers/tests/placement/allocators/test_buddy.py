"""The buddy system and the plain best fit, rule by rule, with cases worked out by hand."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import Block, Trace
from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import allocator_named, layout_of
from overspill.placement.allocators.base import Allocator
from overspill_papers.placement import BestFitConfig, BuddyConfig, CnmemConfig

MIB = 1 << 20


def make(name: str, config: Any = None, capacity_mib: float | None = None) -> Allocator:
    return allocator_named(name, config, capacity_bytes=None if capacity_mib is None else int(capacity_mib * MIB))


def blocks(allocator: Allocator) -> list[tuple[int, str]]:
    return [(block.nbytes, block.state) for segment in allocator.segments() for block in segment.blocks]


def gained(allocator: Allocator) -> list[int]:
    return [event.nbytes // MIB for event in allocator.segment_log]


class TestBuddy:
    @pytest.mark.parametrize(("nbytes", "size"), [(1, 512), (512, 512), (513, 1024), (3 * MIB, 4 * MIB)])
    def test_sizes_are_powers_of_two(self, nbytes: int, size: int) -> None:
        allocator = make("buddy")
        allocator.allocate(nbytes)
        assert allocator.allocated.now == size

    def test_a_block_is_halved_until_it_fits(self) -> None:
        allocator = make("buddy", BuddyConfig(segment_bytes=16 * MIB))
        allocator.allocate(2 * MIB)
        assert [(nbytes // MIB, state) for nbytes, state in blocks(allocator)] == [
            (2, "live"),
            (2, "free"),
            (4, "free"),
            (8, "free"),
        ]

    def test_the_smallest_block_that_fits_is_halved_the_lowest_among_equals(self) -> None:
        allocator = make("buddy", BuddyConfig(segment_bytes=16 * MIB))
        base = allocator.allocate(2 * MIB)
        assert [(allocator.allocate(n * MIB) - base) // MIB for n in (4, 1, 1, 8)] == [4, 2, 3, 8]

    def test_free_buddies_join_as_far_as_they_can(self) -> None:
        allocator = make("buddy", BuddyConfig(segment_bytes=16 * MIB))
        parts = [allocator.allocate(4 * MIB) for _ in range(4)]
        for i in (0, 1, 3):
            allocator.free(parts[i])
        assert [nbytes // MIB for nbytes, state in blocks(allocator) if state == "free"] == [8, 4]
        allocator.free(parts[2])
        assert blocks(allocator) == [(16 * MIB, "free")]

    def test_free_neighbours_that_are_no_buddies_stay_apart(self) -> None:
        allocator = make("buddy", BuddyConfig(segment_bytes=16 * MIB))
        parts = [allocator.allocate(4 * MIB) for _ in range(4)]
        allocator.free(parts[1])
        allocator.free(parts[2])
        allocator.check_integrity()
        assert [nbytes // MIB for nbytes, _ in blocks(allocator)] == [4, 4, 4, 4]
        allocator.allocate(8 * MIB)
        assert gained(allocator) == [16, 16]

    def test_a_large_request_has_a_segment_of_its_own(self) -> None:
        allocator = make("buddy")
        allocator.allocate(5 * MIB)
        assert gained(allocator) == [8]

    @settings(deadline=None, max_examples=60)
    @given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 3 * MIB), st.integers(0, 99)), max_size=40))
    def test_every_block_is_aligned_to_its_size_within_its_segment(self, steps: list[tuple[bool, int, int]]) -> None:
        allocator = allocator_named("buddy", BuddyConfig(least_bytes=1, segment_bytes=4096))
        live: list[int] = []
        for allocates, nbytes, which in steps:
            if allocates or not live:
                live.append(allocator.allocate(nbytes))
            else:
                allocator.free(live.pop(which % len(live)))
            for segment in allocator.segments():
                for block in segment.blocks:
                    assert not block.nbytes & (block.nbytes - 1)
                    assert not (block.address - segment.address) % block.nbytes
        for address in live:
            allocator.free(address)
        assert all(len(segment.blocks) == 1 for segment in allocator.segments())

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"least_bytes": 0}, "least_bytes.* not 0"),
            ({"segment_bytes": 3 * MIB}, "segment_bytes must be"),
            ({"least_bytes": 4 * MIB}, "above segment_bytes"),
        ],
    )
    def test_wrong_settings_are_refused(self, settings: dict[str, int], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            BuddyConfig(**settings)


class TestBestFit:
    def test_the_smallest_hole_that_fits_is_taken_the_lowest_among_equals(self) -> None:
        allocator = make("best-fit")
        parts = [allocator.allocate(n * MIB) for n in (5, 1, 3, 1, 3, 1)]
        for i in (0, 4, 2):
            allocator.free(parts[i])
        assert allocator.allocate(2 * MIB) == parts[2]
        assert allocator.allocate(3 * MIB) == parts[4]

    def test_the_pool_grows_at_its_end_by_whole_pages(self) -> None:
        allocator = make("best-fit")
        first = allocator.allocate(3 * MIB)
        assert allocator.allocate(6 * MIB) == first + 3 * MIB
        assert gained(allocator) == [4, 6]
        (segment,) = allocator.segments()
        assert segment.nbytes == 10 * MIB

    def test_what_is_free_at_the_end_is_grown(self) -> None:
        allocator = make("best-fit", None, 12)
        allocator.allocate(4 * MIB)
        last = allocator.allocate(6 * MIB)
        allocator.free(last)
        assert allocator.allocate(8 * MIB) == last
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(1)

    def test_a_device_without_room_for_the_first_page_is_asked_again(self) -> None:
        allocator = make("best-fit", None, 3)
        with pytest.raises(OutOfMemoryError):
            allocator.allocate(4 * MIB)
        allocator.allocate(2 * MIB)

    @pytest.mark.parametrize("seed", range(5))
    def test_it_places_as_cnmem_does_in_a_pool_that_is_never_full(self, seed: int) -> None:
        r = random.Random(seed)
        spans = [(i, i + r.randrange(1, 30), r.randrange(1, 9 * MIB)) for i in range(200)]
        trace = Trace(tuple(Block(i, *span) for i, span in enumerate(spans)))
        ours = layout_of(trace, "best-fit")
        theirs = layout_of(trace, "cnmem", CnmemConfig(1 << 40))
        assert ours.offsets == theirs.offsets

    def test_a_step_is_positive(self) -> None:
        with pytest.raises(RequestError, match="step_bytes"):
            BestFitConfig(0)
