"""How a search ends: at the bound at once, else with all its time, and always with the best that it found."""

from __future__ import annotations

import random
import time

import pytest
from tests.placement.packing.small_problems import ragged

from overspill.core import Block, Trace
from overspill.placement.packing import incumbent
from overspill.placement.packing.base import Limits
from overspill.placement.packing.incumbent import Incumbent
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.registry import solver_named
from overspill.placement.packing.solvers import exact, portfolio
from overspill.placement.packing.solvers.portfolio import Portfolio

HARD = ragged(400, random.Random(3))
SMALL = Trace(tuple(Block(i, *row) for i, row in enumerate([(0, 3, 3), (0, 2, 4), (2, 6, 3), (4, 6, 4), (1, 5, 2)])))


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def peak(seconds: float) -> int:
    found = Portfolio().solve(HARD, Limits(time_limit_seconds=seconds))
    assert found.layout is not None
    return found.layout.peak_bytes


@pytest.mark.long
def test_more_time_never_gives_a_higher_peak_and_buys_a_lower_one() -> None:
    none, short, long = peak(1e-6), peak(0.1), peak(2.0)
    assert none >= short >= long
    assert long < none


def test_a_limit_is_used_where_the_bound_is_not_met_and_not_where_it_is() -> None:
    trace = Trace(tuple(Block(i, i % 9, i % 9 + 1 + i % 5, 1 + i % 4) for i in range(60)))
    began = time.process_time()
    assert Portfolio().solve(trace, Limits(time_limit_seconds=60)).optimal
    assert time.process_time() - began < 5
    began, used = time.perf_counter(), time.process_time()
    assert not Portfolio(exact_blocks=0).solve(HARD, Limits(time_limit_seconds=0.7)).optimal
    assert time.perf_counter() - began > 0.7
    assert time.process_time() - used < 5


def test_a_search_that_has_to_gain_something_ends_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incumbent, "LONG_SECONDS", 0.2)
    began = time.process_time()
    Portfolio(exact_blocks=0).solve(HARD, Limits(time_limit_seconds=60, least_gain=0.5))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("name", "where", "what"), [("portfolio", portfolio, "window_bound"), ("exact", exact.Decider, "attempt")]
)
def test_an_interrupt_ends_with_the_best_layout(
    monkeypatch: pytest.MonkeyPatch, name: str, where: object, what: str
) -> None:
    monkeypatch.setattr(where, what, stop)
    found = solver_named(name).solve(HARD if name == "portfolio" else SMALL, Limits(time_limit_seconds=5))
    if found.layout is None or not found.optimal:
        assert found.stopped == "interrupted"
    assert found.layout is not None


def test_an_interrupt_before_there_is_a_layout_is_none_to_hide() -> None:
    best = Incumbent(Problem.of(SMALL), Limits(), 1)
    with pytest.raises(KeyboardInterrupt), best.kept():
        raise KeyboardInterrupt


def test_after_an_interrupt_the_other_spaces_get_one_layout_each(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Trace(tuple(Block(2 * b.id + k, b.start, b.end, b.nbytes, space=k) for b in HARD.blocks for k in (0, 1)))
    monkeypatch.setattr(portfolio, "window_bound", stop)
    began = time.process_time()
    found = Portfolio().solve(both, Limits(time_limit_seconds=120))
    assert found.layout is not None
    assert found.stopped == "interrupted"
    assert time.process_time() - began < 20
