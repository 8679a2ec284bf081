"""Training loops whose steps are recorded, solved and replayed, on host memory that keeps every byte."""

from __future__ import annotations

import pytest
from tests.runtime.live.live import FirstFit, Witness

from overspill.core.errors import OutOfMemory, RequestError
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.planned_steps import PlannedSteps, PoolPhase


class Loop:
    """A loop that keeps a state made in its first step, and gradients from one step to the next."""

    def __init__(self) -> None:
        self.witness = Witness(LiveAllocator("host"))
        self.steps = PlannedSteps(self.witness.allocator, FirstFit())
        self.gradients: list[int] = []
        self.state: list[int] = []

    def run(self, batch: int) -> None:
        self.steps.begin_step()
        activations = [self.witness.allocate(512 * batch * n) for n in (3, 1, 4, 1, 5)]
        for gradient in self.gradients:
            self.witness.free(gradient)
        self.gradients = []
        for activation in reversed(activations):
            self.gradients.append(self.witness.allocate(2048))
            self.witness.free(activation)
        if not self.state:
            self.state = [self.witness.allocate(2048) for _ in self.gradients]
        self.witness.check_all()

    def planned_share(self, batch: int) -> float:
        before = self.witness.allocator.statistics()
        self.run(batch)
        now = self.witness.allocator.statistics()
        return (now.planned - before.planned) / (now.requests - before.requests)


def test_the_first_steps_are_recorded_and_all_others_planned() -> None:
    loop = Loop()
    phases = []
    for _ in range(6):
        loop.run(batch=4)
        phases.append(loop.steps.phase)
    assert phases == [PoolPhase.WARM_UP, *[PoolPhase.RECORDING] * 2, *[PoolPhase.PLANNED] * 3]
    assert loop.planned_share(batch=4) == 1
    assert loop.planned_share(batch=3) == 1  # smaller requests have room in their places
    assert loop.steps.plans == 1


def test_a_larger_step_is_served_and_then_planned_anew() -> None:
    loop = Loop()
    for _ in range(4):
        loop.run(batch=4)
    assert (
        loop.planned_share(batch=5) == 0.7
    )  # the gradients, and what has a place of its size behind its own or fits there
    for _ in range(2):
        loop.run(batch=5)
        assert loop.steps.phase is PoolPhase.RECORDING
    loop.run(batch=5)
    assert loop.steps.phase is PoolPhase.DRAINING  # the gradients that lie in the old arena go in this step
    assert loop.planned_share(batch=5) == 1
    assert loop.steps.plans == 2


def test_a_loop_that_never_repeats_itself_is_planned_less_and_less_often() -> None:
    loop = Loop()
    for batch in range(1, 40):
        loop.run(batch)
    assert loop.steps.plans == 5  # in steps 4, 7, 11, 17 and 27


def test_the_arena_is_as_large_as_the_layout_and_holds_the_step() -> None:
    loop = Loop()
    for _ in range(5):
        loop.run(batch=4)
    assert loop.steps.layout is not None
    assert loop.steps.trace is not None
    loop.steps.layout.validate(loop.steps.trace)
    state = 2 << 20  # a segment of the pool, for what the first step made
    assert loop.witness.allocator.statistics().reserved_bytes <= state * 2 + loop.steps.layout.peak_bytes + 4096


def test_a_negative_warm_up_is_refused() -> None:
    with pytest.raises(RequestError, match="-1 steps"):
        PlannedSteps(LiveAllocator("host"), FirstFit(), warm_up_steps=-1)


def test_an_arena_goes_before_the_next_one_comes() -> None:
    """Each step leaves gradients in the arena; for one step the pool serves all, so that no two arenas are there at once."""
    loop = Loop()
    for _ in range(4):
        loop.run(batch=64)
    assert loop.steps.layout is not None
    first = loop.steps.layout.peak_bytes
    most = 0
    phases = []
    for _ in range(6):
        loop.run(batch=65)
        phases.append(loop.steps.phase)
        if loop.steps.phase is PoolPhase.PLANNED:
            most = max(most, loop.witness.allocator.statistics().reserved_bytes)
    assert phases[1:] == [
        PoolPhase.RECORDING,
        PoolPhase.RECORDING,
        PoolPhase.DRAINING,
        PoolPhase.PLANNED,
        PoolPhase.PLANNED,
    ]
    assert loop.planned_share(batch=65) == 1
    assert loop.steps.layout.peak_bytes > first
    assert most - (2 << 20) < first + loop.steps.layout.peak_bytes  # a segment of the pool, and not two arenas


def test_within_a_limit_steps_go_on_though_there_is_no_room_for_an_arena() -> None:
    loop = Loop()
    loop.run(batch=4)
    loop.steps.limit(loop.witness.allocator.statistics().reserved_bytes)
    for _ in range(2):
        loop.run(batch=4)
    with pytest.warns(UserWarning, match="same limit"):
        loop.run(batch=4)
    loop.run(batch=4)
    assert loop.steps.plans == 1
    assert loop.planned_share(batch=4) == 0
    now = loop.witness.allocator.statistics()
    assert now.peak_reserved_bytes == loop.witness.allocator.capacity_bytes


def test_a_limit_gives_back_what_is_over_and_unused() -> None:
    allocator = LiveAllocator("host")
    allocator.free(allocator.allocate(30 << 20))
    assert allocator.statistics().reserved_bytes == 30 << 20
    allocator.limit(4 << 20)
    assert allocator.statistics().reserved_bytes == 0
    with pytest.raises(OutOfMemory):
        allocator.allocate(8 << 20)
    allocator.limit(32 << 20)
    allocator.allocate(8 << 20)


def test_an_extra_request_does_not_shift_the_others() -> None:
    """As a kernel's scratch that was not recorded: it and what the plan has no place for come from the pool."""
    loop = Loop()
    for _ in range(4):
        loop.run(batch=4)
    allocate = loop.witness.allocate
    extra: list[int] = []

    def with_extra(nbytes: int) -> int:
        if nbytes == 512 * 4 * 4:
            extra.append(allocate(100_000))
        return allocate(nbytes)

    before = loop.witness.allocator.statistics()
    loop.witness.allocate = with_extra  # type: ignore[method-assign, assignment]
    loop.run(batch=4)
    now = loop.witness.allocator.statistics()
    assert len(extra) == 1
    assert now.requests - before.requests == 11
    assert now.planned - before.planned == 10
