"""CP-SAT, in its own process, agrees with the optimum of small problems."""

from __future__ import annotations

import importlib.util

import pytest
from tests.placement.packing.small_problems import optimum

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.placement.packing.base import Limits
from overspill.placement.packing.solvers import cp_sat
from overspill.placement.packing.solvers.cp_sat import CpSat

needs_ortools = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="OR-Tools is not installed")
RING = ((0, 2, 4), (1, 4, 3), (3, 6, 4), (5, 8, 3), (0, 1, 2), (2, 7, 2))
PLAIN = Trace(tuple(Block(i, s, e, n) for i, (s, e, n) in enumerate(RING)))
MIXED = Trace(
    (
        Block(0, 0, 8, 3, alignment=2, gaps=((2, 5),)),
        Block(1, 1, 6, 4, alignment=4),
        Block(2, 2, 5, 3, pinned=1),
        Block(3, 4, 8, 2, alignment=2),
        Block(4, 0, 3, 5),
    )
)


@needs_ortools
@pytest.mark.parametrize("trace", [PLAIN, MIXED], ids=["plain", "aligned, pinned and with gaps"])
def test_it_finds_the_optimum_and_proves_it(trace: Trace) -> None:
    found = CpSat().solve(trace)
    assert found.layout is not None
    assert found.layout.peak_bytes == optimum(trace) == found.bound_bytes


@pytest.mark.long
@needs_ortools
def test_it_decides_a_capacity() -> None:
    best = optimum(MIXED)
    assert best is not None
    assert best > MIXED.lower_bound_bytes
    fits, too_small = (CpSat().solve(MIXED, Limits(capacity)) for capacity in (best, best - 1))
    assert fits.layout is not None
    assert fits.layout.peak_bytes == best
    assert too_small.bound_bytes == best


@needs_ortools
def test_a_time_limit_ends_with_the_incumbent_and_the_lower_bound() -> None:
    found = CpSat().solve(PLAIN, Limits(time_limit_seconds=0.0))
    assert found.layout is not None
    assert PLAIN.lower_bound_bytes <= found.bound_bytes <= found.layout.peak_bytes


def test_without_or_tools_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"pip install overspill\[cp-sat\]"):
        CpSat().solve(PLAIN)
