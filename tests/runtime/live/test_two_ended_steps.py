"""The pool with two ends under a loop: squeezed after the first step, enlarged by β when a step finds no room."""

from __future__ import annotations

import pytest
from tests.runtime.live.live import KIB, grouped

from overspill.core import Mobility
from overspill.core.errors import OutOfMemory
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.two_ended_steps import TwoEndedSteps

BETA = 4 * KIB


class Loop:
    """Steps that keep two movable blocks and one temporary one at a time, beside a gradient that stays."""

    def __init__(self, *, restarts: bool, capacity: int = 1024 * KIB) -> None:
        self.allocator = LiveAllocator("host", "two-ended", main_bytes=512 * KIB)
        self.steps = TwoEndedSteps(self.allocator, restarts=restarts, beta_bytes=BETA)
        self.steps.limit(capacity)
        self.steps._resize(512 * KIB)
        self.gradients: list[int] = []

    def run(self, nbytes: int) -> None:
        self.steps.begin_step()
        self.carry_out(nbytes)

    def carry_out(self, nbytes: int) -> None:
        live = []
        try:
            for group in (Mobility.MOVABLE, Mobility.TEMPORARY, Mobility.MOVABLE):
                with grouped(group):
                    live.append(self.allocator.allocate(nbytes))
            if not self.gradients:
                with grouped(Mobility.RECLAIMED):
                    self.gradients.append(self.allocator.allocate(nbytes))
        finally:
            for address in live:
                self.allocator.free(address)


def test_after_the_first_step_the_gap_goes_but_for_beta() -> None:
    loop = Loop(restarts=True)
    for _ in range(3):
        loop.run(16 * KIB)
    assert loop.steps.report().squeezes == 1
    assert loop.allocator.statistics().main_bytes == 48 * KIB + BETA
    assert loop.allocator.statistics().reserved_bytes == 64 * KIB + BETA


def test_a_step_that_fails_is_begun_again_with_beta_more_until_it_fits() -> None:
    loop = Loop(restarts=True)
    for _ in range(2):
        loop.run(16 * KIB)
    tries = 0
    loop.steps.begin_step()
    while True:
        try:
            loop.carry_out(20 * KIB)
            break
        except OutOfMemory:
            tries += 1
            assert loop.steps.enlarge()
    assert tries == loop.steps.report().restarts == 2  # 60 KiB in 52, 56 and 60
    assert loop.allocator.statistics().main_bytes == 60 * KIB


def test_a_pool_that_may_not_be_larger_lets_scratch_lie_elsewhere_once() -> None:
    loop = Loop(restarts=True, capacity=52 * KIB)
    loop.steps._resize(52 * KIB)
    loop.steps.begin_step()
    with pytest.raises(OutOfMemory):
        loop.carry_out(20 * KIB)
    assert loop.steps.enlarge()
    assert loop.steps.report().restarts == 0
    assert not loop.steps.enlarge()


def test_a_step_that_cannot_be_begun_again_goes_on_beside_and_the_next_one_has_more() -> None:
    loop = Loop(restarts=True)
    for _ in range(2):
        loop.run(16 * KIB)
    loop.steps.begin_step()
    with pytest.raises(OutOfMemory):
        loop.carry_out(20 * KIB)
    assert loop.steps.go_on_beside()
    loop.carry_out(20 * KIB)
    report = loop.steps.report()
    assert (report.restarts, report.resumptions, report.overflows) == (0, 1, 1)
    loop.run(16 * KIB)
    assert loop.allocator.statistics().main_bytes == 52 * KIB + BETA


def test_without_restarts_what_has_no_room_lies_beside_and_the_main_space_grows() -> None:
    loop = Loop(restarts=False)
    for _ in range(2):
        loop.run(16 * KIB)
    for step in range(4):
        loop.run(20 * KIB)
        assert loop.steps.report().overflows == min(step + 1, 2)
    assert not loop.steps.enlarge()
    assert loop.steps.report().restarts == 0
    assert loop.allocator.statistics().main_bytes == 60 * KIB


def test_beta_is_the_papers_share_of_the_budget() -> None:
    steps = TwoEndedSteps(LiveAllocator("host", "two-ended", main_bytes=KIB))
    steps.limit(12 << 30)
    assert steps.beta_bytes == 300 << 20
    steps = TwoEndedSteps(LiveAllocator("host", "two-ended", main_bytes=KIB))
    steps.limit(12 << 20)
    assert steps.beta_bytes == 300 << 10
