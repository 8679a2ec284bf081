"""Replaying events: peaks, failures, elastic allocations, the smallest device, and layouts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.turns import rest_long

from overspill.core import Block, Trace
from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import ALLOCATE, FREE, TRY, CachingConfig, Events, layout_of, minimum_capacity, replay
from overspill.placement.allocators.planned import PlannedAllocator
from overspill.placement.events import EMPTY
from overspill.placement.simulated_device import PAGE_BYTES
from overspill_papers.placement import BfcConfig

MIB = 1 << 20
Case = Callable[[str, int], tuple[Events, Any, int | None]]
relaxed = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
spans = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 30 * MIB), st.integers(0, 1))


def events_of(*rows: tuple[int, int, int] | tuple[int, int]) -> Events:
    """Events from `(action, block, MiB)` or `(FREE, block)`."""
    return Events.from_rows([(row[0], row[1], row[2] * MIB if len(row) == 3 else 0, 0) for row in rows])


def trace_of(pieces: list[tuple[int, int, int, int]]) -> Trace:
    return Trace(
        tuple(Block(i, min(a, b), max(a, b), nbytes, stream=stream) for i, (a, b, nbytes, stream) in enumerate(pieces))
    )


def test_an_empty_trace_needs_nothing(name: str) -> None:
    result = replay(Events.of(Trace(())), name, curves=True)
    assert result.fits
    assert (result.peak_requested_bytes, result.peak_reserved_bytes, result.peak_reserved_at) == (0, 0, -1)
    assert result.segment_events == ()
    assert result.addresses.size == 0
    assert result.requested is not None
    assert result.requested.size == 0
    assert minimum_capacity(Events.of(Trace(())), name) == 0


def test_the_peaks_and_where_they_are() -> None:
    events = events_of((ALLOCATE, 0, 12), (ALLOCATE, 1, 19), (FREE, 0), (ALLOCATE, 2, 11), (FREE, 1), (FREE, 2))
    result = replay(events, curves=True)
    assert (result.peak_requested_bytes, result.peak_requested_at) == (31 * MIB, 1)
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (32 * MIB, 1)
    assert (result.peak_reserved_bytes, result.peak_reserved_at) == (32 * MIB, 1)
    assert result.addresses[2] == result.addresses[0]
    assert result.requested is not None
    assert (result.requested // MIB).tolist() == [12, 31, 19, 30, 11, 0]
    assert result.allocated is not None
    assert (result.allocated // MIB).tolist() == [12, 32, 20, 32, 12, 0]
    assert result.reserved is not None
    assert (result.reserved // MIB).tolist() == [12, 32, 32, 32, 32, 32]
    assert [(e.at, e.action, e.nbytes // MIB) for e in result.segment_events] == [
        (0, "segment_alloc", 12),
        (1, "segment_alloc", 20),
    ]


def test_a_replay_stops_at_the_first_allocation_without_room(name: str) -> None:
    events = events_of((ALLOCATE, 0, 12), (ALLOCATE, 1, 30), (FREE, 0))
    result = replay(events, name, capacity_bytes=30 * MIB, curves=True)
    assert not result.fits
    assert result.failed_at == 1
    assert result.addresses[1] == -1
    assert result.requested is not None
    assert result.requested.tolist() == [12 * MIB]


def test_an_emptied_cache_is_the_device_s_again() -> None:
    rows = ((ALLOCATE, 0, 12), (ALLOCATE, 1, 30), (FREE, 0)), ((EMPTY, 2), (ALLOCATE, 3, 40))
    events = events_of(*rows[0], *rows[1], (FREE, 1))
    result = replay(events, curves=True)
    assert result.reserved is not None
    assert (result.reserved // MIB).tolist() == [12, 42, 42, 30, 70, 70]
    assert events.peak_requested_bytes == 70 * MIB
    assert replay(events_of(*rows[0], rows[1][1])).peak_reserved_bytes == 82 * MIB


def test_an_elastic_allocation_without_room_is_skipped_with_its_free(name: str) -> None:
    events = events_of((ALLOCATE, 0, 12), (TRY, 1, 30), (FREE, 1), (FREE, 0), (TRY, 1, 5), (FREE, 1))
    result = replay(events, name, capacity_bytes=30 * MIB)
    assert result.fits
    assert result.skipped == 1
    assert result.peak_requested_bytes == 12 * MIB
    assert result.addresses[1] > 0


def test_blocks_of_no_bytes_lie_nowhere(name: str) -> None:
    result = replay(events_of((ALLOCATE, 0, 0), (TRY, 1, 0), (FREE, 0), (FREE, 1)), name, capacity_bytes=0)
    assert result.fits
    assert result.addresses.tolist() == [0, 0]


def test_two_to_the_62_bytes_fail_on_every_device(name: str) -> None:
    events = Events.from_rows([(ALLOCATE, 0, 2**62, 0)])
    assert replay(events, name).failed_at == 0
    with pytest.raises(OutOfMemoryError, match="any size"):
        minimum_capacity(events, name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(ALLOCATE, 3, 1), (ALLOCATE, 3, 1)], "event 1 .*block 3"),
        ([(ALLOCATE, 3, 1), (FREE, 3), (FREE, 3)], "event 2 .*block 3"),
        ([(FREE, 0)], "event 0 frees"),
        ([(TRY, 0, 1000), (TRY, 0, 1)], "event 1 allocates"),
    ],
)
def test_events_in_the_wrong_order_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        replay(events_of(*rows), capacity_bytes=100 * MIB)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0], [0], [1], [0, 0]), "one length"),
        (([4], [0], [1], [0]), "action other"),
        (([0, 0], [0, -1], [1, 1], [0, 0]), "event 1 .*negative block"),
        (([0], [0], [-5], [0]), "negative size"),
        (([0], [0], [1], [-1]), "negative stream"),
        (([0], [0], [1.5], [0]), "not float64"),
        (([0], [0], [2**63], [0]), "nbytes .*int64"),
        (([0], [2**40], [1], [0]), "block above"),
        ((3, [0], [1], [0]), "action .*one row"),
    ],
)
def test_malformed_events_are_refused(columns: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Events(*columns)


def test_at_one_position_frees_come_before_allocations() -> None:
    trace = Trace((Block(0, 0, 2, 100), Block(1, 2, 3, 50), Block(2, 1, 2, 70, stream=4, elastic=True)))
    events = Events.of(trace)
    assert events.action.tolist() == [ALLOCATE, TRY, FREE, FREE, ALLOCATE, FREE]
    assert events.block.tolist() == [0, 2, 0, 2, 1, 1]
    assert events.nbytes[1] == 70
    assert events.stream.tolist() == [0, 4, 0, 4, 0, 0]


def test_a_block_of_no_time_is_freed_at_once() -> None:
    events = Events.of(Trace((Block(0, 1, 1, 100), Block(1, 1, 2, 50))))
    assert list(zip(events.action.tolist(), events.block.tolist(), strict=True)) == [
        (ALLOCATE, 0),
        (FREE, 0),
        (ALLOCATE, 1),
        (FREE, 1),
    ]


@relaxed
@given(pieces=st.lists(spans, max_size=12), expandable=st.booleans())
def test_a_layout_is_valid_and_no_higher_than_what_was_reserved(
    name: str, pieces: list[tuple[int, int, int, int]], expandable: bool
) -> None:
    trace = trace_of(pieces)
    config = CachingConfig(expandable_segments=expandable) if name == "pytorch" else None
    layout = layout_of(trace, name, config)
    layout.validate(trace)
    assert layout.solver == name
    result = replay(Events.of(trace), name, config=config)
    assert layout.peak_bytes <= result.peak_reserved_bytes or name == "chunked"  # whose addresses are virtual
    assert result.peak_requested_bytes == trace.lower_bound_bytes or any(b.start == b.end for b in trace.blocks)


def test_a_trace_without_room_has_no_layout() -> None:
    with pytest.raises(RequestError, match="address space"):
        layout_of(Trace((Block(0, 0, 1, 2**62),)))


@pytest.mark.parametrize("seed", range(25))
def test_the_minimum_capacity_survives_and_one_page_less_does_not(name: str, seed: int, random_case: Case) -> None:
    events, config, _ = random_case(name, seed)
    if name in ("chainer", "cnmem", "gtbm"):
        config = None  # a limit of the pool's own fails on every device
    least = minimum_capacity(events, name, config)
    assert least % PAGE_BYTES == 0
    assert least >= events.peak_requested_bytes
    assert replay(events, name, capacity_bytes=least, config=config).fits
    assert least == 0 or not replay(events, name, capacity_bytes=least - PAGE_BYTES, config=config).fits


def test_the_minimum_capacity_can_be_below_what_is_reserved_without_a_limit() -> None:
    events = events_of((ALLOCATE, 0, 30), (FREE, 0), (ALLOCATE, 1, 40), (FREE, 1), (ALLOCATE, 2, 50), (FREE, 2))
    assert replay(events).peak_reserved_bytes == 120 * MIB
    assert minimum_capacity(events) == 50 * MIB


def test_elastic_allocations_do_not_raise_the_minimum_capacity() -> None:
    events = events_of((ALLOCATE, 0, 30), (TRY, 1, 400), (FREE, 1), (FREE, 0))
    assert minimum_capacity(events) == 30 * MIB


@pytest.mark.parametrize("seed", rest_long(range(40), range(15)))
@pytest.mark.parametrize("allocator", ["pytorch", "mxnet", "chainer", "cnmem"])
def test_when_nothing_had_to_be_given_back_more_memory_changes_nothing(
    allocator: str, seed: int, random_case: Case
) -> None:
    # With the default settings these four see the device's size only when it refuses. (TensorFlow's regions depend on
    # what is left of the device.)
    events, _, _ = random_case(allocator, seed)
    uncapped = replay(events, allocator)
    for pages in range(0, 400, 20):
        result = replay(events, allocator, capacity_bytes=pages * PAGE_BYTES)
        if result.fits and not result.retries and not result.skipped:
            assert np.array_equal(result.addresses, uncapped.addresses)
            assert replay(events, allocator, capacity_bytes=(pages + 7) * PAGE_BYTES).fits


@pytest.mark.parametrize("seed", rest_long(range(40), range(15)))
def test_a_pool_that_gives_nothing_back_survives_on_every_larger_device(seed: int, random_case: Case) -> None:
    events, _, _ = random_case("cnmem", seed)
    firm = Events(np.where(events.action == TRY, ALLOCATE, events.action), events.block, events.nbytes, events.stream)
    fits = [replay(firm, "cnmem", capacity_bytes=pages * PAGE_BYTES).fits for pages in range(0, 400, 5)]
    assert fits == sorted(fits)


@pytest.mark.parametrize("allocator", ["pytorch", "chainer"])
def test_a_larger_device_can_fail_where_a_smaller_one_survives(allocator: str) -> None:
    # At 120 MiB the first 60 must go back for the 70, and the 40 get a segment of their own. At 130 MiB the 60 stay
    # cached, the 40 are split off them, and so pin 60 MiB when the 80 are wanted.
    events = events_of(
        (ALLOCATE, 0, 60), (FREE, 0), (ALLOCATE, 1, 70), (ALLOCATE, 2, 40), (FREE, 1), (ALLOCATE, 3, 80)
    )  # fmt: skip
    survives = {n: replay(events, allocator, capacity_bytes=n * MIB).fits for n in range(110, 150, 10)}
    assert survives == {110: False, 120: True, 130: False, 140: True}
    assert minimum_capacity(events, allocator) == 140 * MIB


def test_the_minimum_capacity_of_an_allocator_that_takes_the_whole_device() -> None:
    events = events_of((ALLOCATE, 0, 30), (ALLOCATE, 1, 30), (FREE, 0), (FREE, 1))
    assert minimum_capacity(events, "tensorflow", BfcConfig(allow_growth=False)) == 60 * MIB


@given(rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 1000)), max_size=30))
def test_the_peak_of_requests_leaves_elastic_blocks_out(rows: list[tuple[int, int, int]]) -> None:
    events: list[tuple[int, int, int, int]] = []
    live: dict[int, int] = {}
    peak = 0
    for action, block, nbytes in rows:
        if (action == FREE) != (block in live):
            continue
        events.append((action, block, nbytes, 0))
        if action == FREE:
            del live[block]
        else:
            live[block] = nbytes if action == ALLOCATE else 0
        peak = max(peak, sum(live.values()))
    assert Events.from_rows(events).peak_requested_bytes == peak


@pytest.mark.parametrize("mebibytes", [100, 130, 400])
@given(
    steps=st.lists(st.lists(st.sampled_from([0, 700, MIB, 30 * MIB, 60 * MIB]), max_size=12), min_size=2, max_size=4)
)
@relaxed
def test_steps_are_served_as_they_are_call_by_call(mebibytes: int, steps: list[list[int]]) -> None:
    def rows(step: list[int]) -> list[tuple[int, int, int]]:
        """The first half of the blocks is free before the second comes."""
        blocks = [*enumerate(step)]
        first, second = blocks[: len(step) // 2], blocks[len(step) // 2 :]
        made = [[(ALLOCATE, i, size) for i, size in half] for half in (first, second)]
        freed = [[(FREE, i, 0) for i, _ in half] for half in (first, second)]
        return [*made[0], *freed[0], (EMPTY, 100, 0), *made[1], *freed[1]]

    at_once, one_by_one = (PlannedAllocator(capacity_bytes=mebibytes * MIB) for _ in range(2))
    retries: list[int] | None = []
    try:
        for step in steps:
            addresses = {}
            for action, block, nbytes in rows(step):
                if action == ALLOCATE:
                    addresses[block] = one_by_one.allocate(nbytes)
                elif action == FREE:
                    one_by_one.free(addresses[block])
                else:
                    one_by_one.empty_cache()
            one_by_one.mark_step()
            retries.append(one_by_one.retries)
    except OutOfMemoryError:
        retries = None
    assert at_once.serve_steps(map(rows, steps)) == retries
    assert (at_once.counts, at_once.reserved, at_once.segment_log) == (
        one_by_one.counts, one_by_one.reserved, one_by_one.segment_log,
    )  # fmt: skip
