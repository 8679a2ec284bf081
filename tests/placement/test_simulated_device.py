"""The simulated device: addresses, pages, and when it says no."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from overspill.placement.simulated_device import FIRST_ADDRESS, PAGE_BYTES, FreeRanges, SimulatedDevice, round_up

MIB = 1 << 20


def test_memory_is_given_out_by_2_mib() -> None:
    device = SimulatedDevice(10 * MIB)
    assert device.malloc(3 * MIB) == FIRST_ADDRESS
    assert device.used_bytes == 4 * MIB
    assert device.malloc(7 * MIB) is None
    assert device.malloc(5 * MIB) == FIRST_ADDRESS + 4 * MIB


def test_a_device_that_is_no_whole_number_of_pages_wastes_the_rest() -> None:
    device = SimulatedDevice(5 * MIB)
    assert device.malloc(4 * MIB) is not None
    assert device.malloc(1) is None


def test_small_requests_share_a_page() -> None:
    device = SimulatedDevice(2 * MIB)
    first, second = device.malloc(1), device.malloc(513)
    assert (first, second) == (FIRST_ADDRESS, FIRST_ADDRESS + 512)
    assert device.used_bytes == PAGE_BYTES
    device.free(FIRST_ADDRESS)
    device.free(FIRST_ADDRESS + 512)
    assert device.used_bytes == 0
    assert device.malloc(2 * MIB) == FIRST_ADDRESS


def test_the_lowest_free_addresses_are_given_out_first() -> None:
    device = SimulatedDevice()
    blocks = [device.malloc(4 * MIB) for _ in range(3)]
    assert blocks[0] is not None
    device.free(blocks[0])
    assert device.malloc(6 * MIB) == FIRST_ADDRESS + 12 * MIB
    assert device.malloc(2 * MIB) == FIRST_ADDRESS


def test_mapped_pages_count_and_reserved_addresses_do_not() -> None:
    device = SimulatedDevice(10 * MIB)
    base = device.reserve(1 << 40)
    assert base is not None
    assert device.used_bytes == 0
    assert device.map(base, 8 * MIB)
    assert not device.map(base + 8 * MIB, 4 * MIB)
    device.unmap(base, 8 * MIB)
    device.unreserve(base, 1 << 40)
    assert device.used_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=60))
@example([(MIB - 511, False)])
def test_blocks_never_overlap_and_all_memory_comes_back(requests: list[tuple[int, bool]]) -> None:
    device = SimulatedDevice(64 * MIB)
    live: dict[int, int] = {}
    for nbytes, frees in requests:
        if frees and live:
            address = next(iter(live))
            device.free(address)
            del live[address]
        address_or_none = device.malloc(nbytes)
        if address_or_none is not None:
            live[address_or_none] = nbytes
        spans = sorted((start, start + size) for start, size in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert sum(live.values()) <= device.used_bytes <= 64 * MIB
    for address in live:
        device.free(address)
    assert device.used_bytes == 0
    assert device.malloc(64 * MIB) == FIRST_ADDRESS


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=40))
def test_ranges_join_whatever_order_they_come_back_in(pieces: list[tuple[int, int]]) -> None:
    ranges = FreeRanges(0, 100)
    taken = [(start, size) for _, size in pieces if (start := ranges.take(size)) is not None]
    for start, size in sorted(taken, key=hash):
        ranges.give(start, size)
    assert ranges.free_bytes == 100
    assert ranges.take(100) == 0


def test_rounding_up_gives_the_next_multiple() -> None:
    assert [round_up(n, 512) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
