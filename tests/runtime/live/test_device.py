"""Live memory: physical pieces in any order behind contiguous addresses, and how much of it is resident."""

from __future__ import annotations

import pytest
from tests.runtime.live.live import KIB, POOLS, Witness

from overspill.core.errors import OutOfMemory, RequestError
from overspill.runtime.live.allocator import LiveAllocator

MIB = 1 << 20


def checkerboard(pool: str) -> tuple[Witness, LiveAllocator]:
    """Sixteen blocks of 2 MiB, every other one of which is freed."""
    options = {"chunk_bytes": MIB} if pool == "virtual" else {"main_bytes": 40 * MIB} if pool == "two-ended" else {}
    allocator = LiveAllocator("host", pool, **options)
    witness = Witness(allocator)
    blocks = [witness.allocate(2 * MIB) for _ in range(16)]
    for address in blocks[::2]:
        witness.free(address)
    return witness, allocator


def test_virtual_addressing_needs_no_memory_for_holes() -> None:
    witness, allocator = checkerboard("virtual")
    assert allocator.statistics().reserved_bytes == 32 * MIB
    witness.allocate(16 * MIB)  # out of eight holes of 2 MiB
    witness.check_all()
    assert allocator.statistics().peak_reserved_bytes == 32 * MIB


def test_best_fit_needs_more_for_the_same() -> None:
    witness, allocator = checkerboard("best-fit")
    witness.allocate(16 * MIB)
    assert allocator.statistics().peak_reserved_bytes > 32 * MIB


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_memory_that_is_given_back_is_no_longer_resident(pool: str) -> None:
    witness, allocator = checkerboard(pool)
    assert allocator.resident_bytes() >= 32 * MIB
    for address in list(witness.live):
        witness.free(address)
    allocator.trim()
    assert allocator.resident_bytes() == 0
    assert allocator.statistics().reserved_bytes == 0


def test_holes_in_virtual_memory_are_given_back_too() -> None:
    witness, allocator = checkerboard("virtual")
    allocator.trim()
    assert allocator.resident_bytes() == allocator.statistics().reserved_bytes == 16 * MIB
    witness.check_all()


def test_a_full_device_gives_one_streams_chunks_to_another_when_its_work_is_done() -> None:
    allocator = LiveAllocator("host", "virtual", capacity_bytes=256 * KIB, chunk_bytes=64 * KIB, events_by_hand=True)
    witness = Witness(allocator, events_by_hand=True)
    for stream in range(3):
        for address in [witness.allocate(100 * KIB, stream) for _ in range(2)]:
            witness.free(address)
        witness.freed.clear()  # the device waits for the stream by itself
    with pytest.raises(OutOfMemory):
        witness.allocate(300 * KIB)
    assert allocator.statistics().peak_reserved_bytes == 256 * KIB
    witness.allocate(256 * KIB)
    witness.check_all()


def test_old_addresses_of_chunks_stay_mapped_until_their_stream_is_done() -> None:
    allocator = LiveAllocator("host", "virtual", chunk_bytes=64 * KIB, events_by_hand=True)
    witness = Witness(allocator, events_by_hand=True)
    old = witness.allocate(128 * KIB)
    held = witness.live[old]
    witness.free(old)
    witness.allocate(192 * KIB)  # takes the two chunks of the old one, and a third
    with pytest.raises(AssertionError, match="was overwritten"):
        witness.check(held)  # it reads what is behind the old address now, and does not crash
    assert allocator.statistics().reserved_bytes == 192 * KIB


def test_a_simulated_device_places_more_than_the_machine_has() -> None:
    allocator = LiveAllocator("simulated", capacity_bytes=80 << 30)
    allocator.free(allocator.allocate(79 << 30))
    with pytest.raises(OutOfMemory):
        allocator.allocate(81 << 30)
    with pytest.raises(RequestError, match="'host' only"):
        allocator.resident_bytes()


def test_wrong_devices_and_pools_are_refused() -> None:
    for options in (
        {"device": "tpu"},
        {"device": "host", "pool": "best"},
        {"device": "host", "pool": "two-ended"},
        {"device": "host", "chunk_bytes": 0},
    ):
        with pytest.raises(RequestError):
            LiveAllocator(**options)
    with pytest.raises(RequestError, match="of device 'cuda'"):
        LiveAllocator("host").as_pluggable()
