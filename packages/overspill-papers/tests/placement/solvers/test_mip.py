"""The mixed integer program agrees with the optimum of small problems."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.random_traces import traces as random_traces
from tests.placement.packing.small_problems import instance, optimum, ragged, traces
from tests.placement.packing.test_scaling import scaled

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits, SolverFailed
from overspill_papers.placement.solvers import mip
from overspill_papers.placement.solvers.mip import Mip
from overspill_papers.placement.solvers.processes import GRACE_SECONDS

RING = ((0, 2, 4), (1, 4, 3), (3, 6, 4), (5, 8, 3), (0, 1, 2), (2, 7, 2))


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(-2, 2))
def test_it_finds_the_optimum_of_small_problems_and_proves_it(trace: Trace, spare: int) -> None:
    best, found = optimum(trace), Mip().solve(trace)
    assert found.layout is not None
    assert found.layout.peak_bytes == best == found.bound_bytes
    within = Mip().solve(trace, Limits(max(best + spare, 0)))
    assert within.layout is not None
    assert (within.layout.peak_bytes <= max(best + spare, 0)) == (spare >= 0)
    assert within.bound_bytes <= best


def test_a_time_limit_ends_with_the_incumbent_and_the_best_bound() -> None:
    trace = Trace(instance("C").blocks[:60])
    found = Mip().solve(trace, Limits(time_limit_seconds=0.2))
    assert found.layout is not None
    assert trace.lower_bound_bytes <= found.bound_bytes <= found.layout.peak_bytes


def test_large_sizes_lose_no_byte() -> None:
    sizes = [3 * 2**40 + 512, 5 * 2**40, 2**40 + 1024, 7 * 2**40]
    lives = [(0, 3), (2, 5), (4, 7), (1, 6)]
    trace = Trace(
        tuple(Block(i, s, e, n, alignment=512) for i, ((s, e), n) in enumerate(zip(lives, sizes, strict=True)))
    )
    found = Mip().solve(trace)
    assert found.layout is not None
    assert found.layout.peak_bytes == optimum(trace)


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip, "PAIR_LIMIT", 2)
    with pytest.raises(RequestError, match="3 pairs of blocks"):
        Mip().solve(Trace(tuple(Block(i, 0, 1, 1) for i in range(3))))


def test_sizes_far_apart_neither_break_a_layout_nor_the_time_limit() -> None:
    draw = random.Random(0)
    for _ in range(3):
        blocks = []
        for i in range(8):
            start, size = draw.randrange(6), draw.randrange(1, 5000) + (2**40 if i < 2 else 0)
            blocks.append(Block(i, start, start + draw.randrange(1, 6), size, alignment=2 ** draw.randrange(9)))
        began = time.process_time()
        found = Mip().solve(Trace(tuple(blocks)), Limits(time_limit_seconds=0.5))
        assert found.layout is not None
        assert time.process_time() - began < 0.5 + GRACE_SECONDS + 1


def test_places_that_are_equal_or_not_quite_apart_make_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(tuple(Block(i, s, e, n, alignment=4) for i, (s, e, n) in enumerate(RING)))
    asked = []
    for places in ([0.0] * len(RING), [float(7 * i % 5) for i in range(len(RING))]):

        def answer(*_: object, given: list[float] = places) -> dict[str, object]:
            asked.append(given)
            return {"places": given, "bound": 0.0}

        monkeypatch.setattr(mip, "ask", answer)
        assert Mip().solve(trace).layout is not None
    assert len(asked) == 2


def test_a_failure_of_anothers_solver_comes_with_the_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SolverFailed("HiGHS failed: no licence")

    monkeypatch.setattr(mip, "ask", fail)
    monkeypatch.setattr(mip, "RESTARTS", 0)
    found = Mip().solve(Trace(ragged(40, random.Random(3)).blocks), Limits(time_limit_seconds=5))
    assert found.layout is not None
    assert found.stopped in ("HiGHS failed: no licence", "")
    assert found.optimal or found.stopped


@pytest.mark.long
@given(trace=random_traces(count=5), factor=st.sampled_from([2, 3, 512, 1 << 20]))
@settings(max_examples=8, deadline=None)
def test_the_optimum_scales_with_the_sizes(trace: Trace, factor: int) -> None:
    # A library proves the optimum, but may take any layout that has it.
    small, large = (Mip().solve(t) for t in (trace, scaled(trace, factor)))
    assert small.optimal
    assert large.optimal
    assert large.bound_bytes == factor * small.bound_bytes
