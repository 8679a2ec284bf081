"""The live allocator on host memory: no live byte is ever overwritten."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.live.live import KIB, POOLS, Witness, grouped, random_trace

from overspill.core import Mobility, Trace
from overspill.core.errors import OutOfMemory, RequestError
from overspill.placement import FREE, Events, replay
from overspill.placement.allocators.registry import allocator_named
from overspill.placement.allocators.two_ended import TwoEndedConfig
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.groups import UNPLANNED

EXAMPLES = settings(max_examples=25, deadline=None)
every_pool = pytest.mark.parametrize("pool", sorted(POOLS))


@pytest.fixture(params=sorted(POOLS))
def witness(request: pytest.FixtureRequest) -> Witness:
    return Witness(LiveAllocator("host", **POOLS[request.param]))


@every_pool
@given(seed=st.integers(0, 2**32), streams=st.integers(1, 3))
@EXAMPLES
def test_no_live_byte_is_overwritten_whatever_is_requested(pool: str, seed: int, streams: int) -> None:
    """Requests and frees in any order, on several streams whose work is done late."""
    r = random.Random(seed)
    witness = Witness(LiveAllocator("host", events_by_hand=True, **POOLS[pool]), events_by_hand=True)
    for stream in range(streams + 1):  # a stream that the pool sees first may make others wait
        witness.free(witness.allocate(512, stream))
        witness.complete(stream)
    for _ in range(2):
        witness.allocator.begin_step()
        for _ in range(60):
            kind = r.random()
            blocks = list(witness.live)
            if kind < 0.5 or not blocks:
                with grouped(r.choice([0, 1, 2, 3])) if kind < 0.3 else nullcontext():
                    witness.allocate(r.choice([1, 700, 512 * r.randrange(1, 80)]), r.randrange(streams))
            elif kind < 0.8:
                witness.free(r.choice(blocks))
            elif kind < 0.9:
                witness.use(r.choice(blocks), r.randrange(streams + 1))
            else:
                witness.complete(r.randrange(streams + 1))
            if r.random() < 0.1:
                witness.check_all()
    witness.check_all()


def test_threads_share_one_allocator(witness: Witness) -> None:
    failures: list[BaseException] = []

    def work(stream: int) -> None:
        mine = Witness(witness.allocator, tags=stream << 32)
        try:
            for seed in range(3):
                mine.run(Events.of(random_trace(random.Random(seed), 80)), seed)
        except BaseException as error:  # noqa: BLE001  # an assertion of another thread fails no test by itself
            failures.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert witness.allocator.statistics().allocated_bytes == 0


def test_what_a_copy_stream_uses_is_given_out_only_after_its_event() -> None:
    witness = Witness(LiveAllocator("host", events_by_hand=True), events_by_hand=True)
    compute, copy = 0, 7
    first = witness.allocate(5000, compute)
    witness.use(first, copy)
    witness.free(first)
    second = witness.allocate(5000, compute)
    assert second != first
    witness.complete(copy)
    assert witness.allocate(5000, compute) == first
    assert witness.allocator.statistics().deferred == 1


def test_the_two_ended_pool_keeps_temporary_blocks_apart() -> None:
    allocator = LiveAllocator("host", "two-ended", main_bytes=64 * KIB)
    low = allocator.allocate(4096)
    with grouped(Mobility.TEMPORARY):
        high = allocator.allocate(4096)
    assert high - low == 60 * KIB
    assert allocator.allocate(4096) == low + 4096
    outside = [allocator.allocate(60 * KIB)]  # has no room in the main space
    for group in (Mobility.RECLAIMED, UNPLANNED):
        with grouped(group):
            outside.append(allocator.allocate(512))
    assert not any(low <= address < low + 64 * KIB for address in outside)
    assert allocator.statistics().overflows == 1
    assert allocator.statistics().least_gap_bytes == 64 * KIB - 3 * 4096


@given(seed=st.integers(0, 2**32))
@EXAMPLES
def test_the_two_ended_pool_is_the_one_of_the_simulations(seed: int) -> None:
    r = random.Random(seed)
    allocator = LiveAllocator("simulated", "two-ended", main_bytes=64 * KIB)
    expected = allocator_named("gtbm", TwoEndedConfig(64 * KIB))
    live: list[tuple[int, int]] = []
    for _ in range(80):
        if live and r.random() < 0.45:
            address, simulated = live.pop(r.randrange(len(live)))
            allocator.free(address)
            expected.free(simulated)
            continue
        nbytes, group = 512 * r.choice([1, 2, r.randrange(1, 40)]), r.choice(list(Mobility))
        with grouped(group):
            live.append((allocator.allocate(nbytes), expected.allocate(nbytes, mobility=group)))
        assert live[-1][0] == live[-1][1]


def test_a_main_space_is_made_anew_when_nothing_lies_there() -> None:
    allocator = LiveAllocator("host", "two-ended", main_bytes=64 * KIB)
    block = allocator.allocate(4096)
    with grouped(Mobility.RECLAIMED):
        staying = allocator.allocate(4096)
    assert not allocator.resize(16 * KIB, grows=False)
    allocator.free(block)
    assert allocator.resize(16 * KIB, grows=False)
    allocator.free(allocator.allocate(16 * KIB))
    assert allocator.statistics().main_bytes == 16 * KIB
    assert allocator.statistics().reserved_bytes == 16 * KIB + 4096
    with pytest.raises(OutOfMemory):
        allocator.allocate(16 * KIB + 1)
    allocator.resize(16 * KIB, grows=True)
    allocator.free(allocator.allocate(16 * KIB + 1))
    allocator.free(staying)


@given(seed=st.integers(0, 2**32))
@EXAMPLES
def test_virtual_addressing_reserves_the_chunks_that_live_blocks_need(seed: int) -> None:
    """The window paper, section 4: it loses nothing but the rest of each block's last chunk."""
    trace = random_trace(random.Random(seed), 50)
    chunked = Trace(tuple(replace(b, nbytes=16 * KIB * (1 + b.nbytes // (16 * KIB))) for b in trace.blocks))
    allocator = LiveAllocator("host", "virtual", chunk_bytes=16 * KIB)
    Witness(allocator).run(Events.of(chunked))
    assert allocator.statistics().peak_reserved_bytes == chunked.lower_bound_bytes


def test_best_fit_reserves_what_the_simulation_of_pytorch_says() -> None:
    for seed in range(5):
        events = Events.of(random_trace(random.Random(seed), 200, streams=2))
        allocator, addresses = LiveAllocator("simulated"), dict[int, int]()
        rows = (events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), events.stream.tolist())
        for action, block, nbytes, stream in zip(*rows, strict=True):
            if action == FREE:
                allocator.free(addresses.pop(block))
            else:
                addresses[block] = allocator.allocate(nbytes, stream)
        assert allocator.statistics().peak_reserved_bytes == replay(events).peak_reserved_bytes


def test_wrong_requests_are_refused() -> None:
    allocator = LiveAllocator("host")
    address = allocator.allocate(10)
    allocator.free(address)
    assert allocator.allocate(0) == 0
    allocator.free(0)
    for wrong in (lambda: allocator.free(address), lambda: allocator.use(address, 1), lambda: allocator.allocate(-1)):
        with pytest.raises(RequestError):
            wrong()


def test_a_device_without_room_says_what_it_holds() -> None:
    for pool, options in POOLS.items():
        allocator = LiveAllocator("host", capacity_bytes=80 * KIB, **options)
        with pytest.raises(OutOfMemory, match=r"100\.0 KiB") as failure:
            allocator.allocate(100 * KIB)
        assert failure.value.capacity_bytes == 80 * KIB, pool
        with pytest.raises(OutOfMemory):
            allocator.allocate(1 << 70)
        assert allocator.statistics().allocated_bytes == 0
