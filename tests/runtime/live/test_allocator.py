"""The live allocator on host memory: no live byte is ever overwritten, and planned requests get their places."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.live.live import (
    ALLOCATE,
    KIB,
    POOLS,
    Replayed,
    Witness,
    first_fit,
    grouped,
    random_trace,
)
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Block, Graph, Layout, Mobility, Trace
from overspill.core.errors import InfeasibleBudget, InvalidLayout, OutOfMemory, RequestError
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import load
from overspill.placement import Events, replay
from overspill.placement.allocators.registry import allocator_named
from overspill.placement.allocators.two_ended import TwoEndedConfig
from overspill.placement.replay import layout_of
from overspill.policies import POLICIES
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.groups import UNPLANNED
from overspill.runtime.preview import step_graph
from overspill.simulate.trace import trace_of

EXAMPLES = settings(max_examples=25, deadline=None)
every_pool = pytest.mark.parametrize("pool", sorted(POOLS))
STEP = network([Layer(nbytes, weight_bytes=3000, workspace_bytes=5000) for nbytes in (20_000, 7_000, 31_000, 12_000)])


@pytest.fixture(params=sorted(POOLS))
def witness(request: pytest.FixtureRequest) -> Witness:
    return Witness(LiveAllocator("host", **POOLS[request.param]))


def rounded(trace: Trace) -> Trace:
    """The trace with sizes and addresses as a CUDA device has them."""
    return Trace(tuple(replace(b, nbytes=-(-b.nbytes // 512) * 512, alignment=512) for b in trace.blocks))


def runs_and_replays(witness: Witness, trace: Trace, checked: float) -> None:
    """One step from the pool, then two by a plan, in which every request gets its place."""
    events = Events.of(trace)
    witness.run(events, checked=checked)
    before = witness.allocator.statistics()
    witness.allocator.replay(trace, first_fit(trace))
    for seed in range(2):
        witness.run(events, seed, checked)
    now = witness.allocator.statistics()
    assert now.planned - before.planned == 2 * sum(1 for b in trace.blocks if b.nbytes)
    assert now.fallbacks == 0
    assert not now.needs_reoptimisation
    assert now.allocated_bytes == 0
    witness.allocator.forget_plan()


def test_steps_of_every_policy_keep_their_bytes_and_get_their_places(witness: Witness) -> None:
    for name in sorted(POLICIES):
        policy = POLICIES[name]()
        try:
            made = policy.plan(STEP, DEVICE, 100_000 if policy.plans_for_budget else None)
        except InfeasibleBudget as error:
            made = policy.plan(STEP, DEVICE, error.floor_bytes)
        runs_and_replays(witness, rounded(trace_of(STEP, made)), checked=0.1)


@pytest.fixture(scope="module")
def captured() -> Graph:
    """A training step as it was captured."""
    return step_graph(Job(lambda: load("gpt2", small=True), 2, "momentum"))


@pytest.mark.parametrize("policy", ["liveness", "vdnn-all", "checkpoint"])
def test_a_captured_step_keeps_its_bytes_and_gets_its_places(witness: Witness, captured: Graph, policy: str) -> None:
    made = POLICIES[policy]().plan(captured, load_device("titan-x"), None)
    runs_and_replays(witness, rounded(trace_of(captured, made)), checked=0.01)


def test_an_online_allocators_layout_can_be_replayed() -> None:
    trace = random_trace(random.Random(3))
    witness = Witness(LiveAllocator("host"))
    witness.allocator.replay(trace, layout_of(trace, "tensorflow"))
    witness.run(Events.of(trace))
    assert witness.allocator.statistics().planned == len(trace.blocks)


def test_a_planned_step_takes_the_memory_of_its_layout() -> None:
    trace = random_trace(random.Random(1))
    allocator = LiveAllocator("host")
    layout = first_fit(trace)
    allocator.replay(trace, layout)
    Witness(allocator).run(Events.of(trace))
    assert allocator.statistics().peak_reserved_bytes == -(-layout.peak_bytes // 4096) * 4096


@every_pool
@given(seed=st.integers(0, 2**32), streams=st.integers(1, 3), plan=st.booleans())
@EXAMPLES
def test_no_live_byte_is_overwritten_whatever_is_requested(pool: str, seed: int, streams: int, plan: bool) -> None:
    """Requests and frees in any order, on several streams whose work is done late, with and without a plan."""
    r = random.Random(seed)
    witness = Witness(LiveAllocator("host", events_by_hand=True, **POOLS[pool]), events_by_hand=True)
    for stream in range(streams + 1):  # a stream that the pool sees first may make others wait
        witness.free(witness.allocate(512, stream))
        witness.complete(stream)
    if plan:
        trace = random_trace(r, 40, streams)
        witness.allocator.replay(trace, first_fit(trace))
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


class Program:
    """Runs a trace on an allocator and beside it on what defines replay; both must answer the same."""

    def __init__(self, trace: Trace) -> None:
        layout = first_fit(trace)
        self.allocator, self.expected = LiveAllocator("simulated"), Replayed(trace, layout)
        self.allocator.replay(trace, layout)
        self.arena_bytes = layout.peak_bytes
        self.base: int | None = None

    def begin_step(self) -> None:
        self.allocator.begin_step()
        self.expected.begin_step()

    def allocate(self, nbytes: int, stream: int) -> tuple[int, int | None]:
        address, offset = self.allocator.allocate(nbytes, stream), self.expected.request(nbytes, stream)
        if offset is not None:
            self.base = address - offset if self.base is None else self.base
            assert address == self.base + offset
        elif self.base is not None:
            assert not self.base <= address < self.base + self.arena_bytes
        return address, offset

    def free(self, block: tuple[int, int | None]) -> None:
        address, offset = block
        self.allocator.free(address)
        if offset is not None:
            self.expected.free(offset)


@given(seed=st.integers(0, 2**32), streams=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_replay_answers_as_it_is_defined(seed: int, streams: int) -> None:
    """A step that now and then asks for something else or for nothing, and frees late, or in another step."""
    r = random.Random(seed)
    trace = random_trace(r, 30, streams)
    program, events = Program(trace), Events.of(trace)
    late: list[tuple[int, int | None]] = []
    for _ in range(3):
        program.begin_step()
        live: dict[int, tuple[int, int | None]] = {}
        rows = (events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), events.stream.tolist())
        for action, block, nbytes, stream in zip(*rows, strict=True):
            if action == ALLOCATE and r.random() > 0.03:
                asked = nbytes if r.random() > 0.1 else r.choice([1, nbytes + 512])
                live[block] = program.allocate(asked, stream if r.random() > 0.03 else 1 - stream)
            elif block in live:
                late.append(live.pop(block))
            while late and r.random() > 0.1:
                program.free(late.pop(r.randrange(len(late))))
        late += live.values()


def test_threads_share_one_allocator(witness: Witness) -> None:
    failures: list[BaseException] = []

    def work(stream: int) -> None:
        mine = Witness(witness.allocator, tags=stream << 32)
        try:
            for seed in range(3):
                mine.run(Events.of(random_trace(random.Random(seed), 80)), seed)
        except BaseException as error:  # noqa: BLE001  # an assertion of another thread fails no test by itself
            failures.append(error)

    trace = random_trace(random.Random(9))
    witness.allocator.replay(trace, first_fit(trace))
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


def test_a_planned_place_that_a_copy_stream_still_reads_is_not_given_out() -> None:
    trace = Trace((Block(0, 0, 1, 1024), Block(1, 2, 3, 1024)))
    witness = Witness(LiveAllocator("host", events_by_hand=True), events_by_hand=True)
    witness.allocator.replay(trace, first_fit(trace))
    witness.allocator.begin_step()
    first = witness.allocate(1024)
    witness.use(first, 7)
    witness.free(first)
    assert witness.allocate(1024) != first
    assert witness.allocator.statistics().occupied == 1
    witness.complete(7)
    witness.allocator.begin_step()
    assert witness.allocate(1024) == first


def test_a_request_larger_than_planned_is_served_and_asks_for_another_plan() -> None:
    trace = Trace((Block(0, 0, 3, 1024), Block(1, 1, 2, 1024)))
    witness = Witness(LiveAllocator("host"))
    witness.allocator.replay(trace, first_fit(trace))
    witness.allocator.begin_step()
    witness.allocate(1000)  # smaller is as well
    assert not witness.allocator.statistics().needs_reoptimisation
    witness.allocate(1025)
    now = witness.allocator.statistics()
    assert (now.planned, now.mismatches, now.needs_reoptimisation) == (1, 1, True)
    witness.check_all()
    witness.allocator.replay(trace, first_fit(trace))
    assert not witness.allocator.statistics().needs_reoptimisation


def test_an_interrupted_part_is_neither_planned_nor_recorded() -> None:
    trace = Trace((Block(0, 0, 3, 1024, alignment=512), Block(1, 1, 2, 512, alignment=512)))
    allocator = LiveAllocator("host")
    allocator.replay(trace, first_fit(trace))
    allocator.record()
    allocator.begin_step()
    first = allocator.allocate(1024)
    with allocator.interrupted():
        allocator.free(allocator.allocate(9999))
    second = allocator.allocate(512)
    allocator.free(second)
    allocator.free(first)
    assert allocator.statistics().planned == 2
    assert allocator.recorded() == trace


def test_a_recorded_step_replays_with_what_it_leaves_to_the_next() -> None:
    """Each step makes gradients that the next one frees, and keeps one block for good."""
    witness = Witness(LiveAllocator("host"))
    kept: list[int] = []
    gradients: list[int] = []

    def step() -> None:
        witness.allocator.begin_step()
        activations = [witness.allocate(4096) for _ in range(3)]
        while gradients:
            witness.free(gradients.pop())
        kept.append(witness.allocate(100))
        for activation in reversed(activations):
            gradients.append(witness.allocate(8192))
            witness.free(activation)
        witness.check_all()

    step()
    witness.allocator.record()
    step()
    step()
    trace = witness.allocator.recorded()
    assert [b.space for b in trace.blocks] == [0, 0, 0, 1, 0, 0, 0]
    assert [b.gaps for b in trace.blocks if b.gaps] == [((5, 7),), ((4, 9),), ((3, 11),)]
    witness.allocator.replay(trace, first_fit(trace))
    planned = witness.allocator.statistics().planned
    for _ in range(3):
        step()
    now = witness.allocator.statistics()
    assert now.planned - planned == 3 * 6
    assert now.fallbacks == 0


def test_a_step_recorded_alone_has_what_it_leaves_live_to_its_end() -> None:
    allocator = LiveAllocator("host")
    allocator.record()
    first, second = allocator.allocate(1, stream=70), allocator.allocate(513, stream=50)
    allocator.free(first)
    assert allocator.recorded() == Trace(
        (Block(0, 0, 2, 512, alignment=512), Block(1, 1, 3, 1024, stream=1, alignment=512))
    )
    allocator.free(second)


def test_a_plan_is_given_up_with_its_last_block() -> None:
    trace = random_trace(random.Random(5))
    allocator = LiveAllocator("host")
    witness = Witness(allocator)
    for _ in range(3):
        allocator.replay(trace, first_fit(trace))
        allocator.begin_step()
        witness.allocate(trace.blocks[0].nbytes)
        witness.check_all()
    three = allocator.statistics().reserved_bytes
    allocator.forget_plan()
    assert allocator.statistics().reserved_bytes == three
    for address in list(witness.live):
        witness.free(address)
    assert allocator.statistics().reserved_bytes == 0


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
        allocator = LiveAllocator("simulated")
        allocator._core.drive(events.action, events.block, events.nbytes, events.stream, events.block_count, 1)
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
    trace = Trace((Block(0, 0, 2, 512), Block(1, 1, 3, 512)))
    with pytest.raises(InvalidLayout):
        allocator.replay(trace, Layout("wrong", (0, 0), 512, 1024))
    gap = Trace((Block(0, 0, 9, 512, gaps=((1, 2), (4, 5))),))
    with pytest.raises(RequestError, match="gaps"):
        allocator.replay(gap, first_fit(gap))


def test_a_plan_is_in_force_from_the_next_step_on() -> None:
    trace = Trace((Block(0, 0, 1, 512),))
    allocator = LiveAllocator("host")
    allocator.replay(trace, first_fit(trace))
    allocator.allocate(9999)
    assert not allocator.statistics().needs_reoptimisation
    allocator.begin_step()
    allocator.allocate(512)
    assert allocator.statistics().planned == 1


def test_an_empty_plan_leaves_all_to_the_pool() -> None:
    allocator = LiveAllocator("host")
    allocator.replay(Trace(()), first_fit(Trace(())))
    allocator.begin_step()
    allocator.free(allocator.allocate(100))
    assert allocator.statistics().needs_reoptimisation


def test_a_device_without_room_says_what_it_holds() -> None:
    trace = Trace((Block(0, 0, 1, 100 * KIB),))
    for pool, options in POOLS.items():
        allocator = LiveAllocator("host", capacity_bytes=80 * KIB, **options)
        with pytest.raises(OutOfMemory, match=r"100\.0 KiB") as failure:
            allocator.allocate(100 * KIB)
        assert failure.value.capacity_bytes == 80 * KIB, pool
        with pytest.raises(OutOfMemory):
            allocator.replay(trace, first_fit(trace))
        with pytest.raises(OutOfMemory):
            allocator.allocate(1 << 70)
        assert allocator.statistics().allocated_bytes == 0
