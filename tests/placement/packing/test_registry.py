"""Solvers by name; a wrong name is told what there is."""

import random
import re
import time

import pytest
from tests.placement.packing.first_fit import FirstFit

from overspill.core import Block, Trace
from overspill.core.errors import RequestError
from overspill.core.registry import Registry
from overspill.placement.packing import registry
from overspill.placement.packing.base import Limits, Solver
from overspill.placement.packing.registry import DEFAULT, SOLVERS, solver_named


def test_every_solver_is_registered_under_its_own_name() -> None:
    for name, solver in SOLVERS.items():
        assert isinstance(solver, Solver)
        assert (solver.name, bool(solver.summary), bool(solver.source)) == (name, True, True)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)


def test_a_wrong_name_is_told_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SOLVERS", Registry("solver", "solvers", {DEFAULT: FirstFit()}))
    assert isinstance(solver_named(), FirstFit)
    with pytest.raises(RequestError, match=r"'portfolo'; .*'portfolio'\? .*portfolio"):
        solver_named("portfolo")
    with pytest.raises(RequestError, match=r"'tape'\. Solvers: portfolio"):
        solver_named("tape")


@pytest.mark.parametrize("capacity", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_keeps_to_its_time_limit(name: str, capacity: bool) -> None:
    draw = random.Random(1)
    blocks = []
    for i in range(300):
        start = draw.randrange(100)
        blocks.append(
            Block(i, start, start + draw.randrange(1, 40), draw.randrange(1, 5000), alignment=1 + 63 * (i % 2))
        )
    trace = Trace(tuple(blocks))
    limits = Limits(trace.lower_bound_bytes if capacity else None, time_limit_seconds=0.2)
    began = time.process_time()
    assert SOLVERS[name].solve(trace, limits).layout is not None
    assert time.process_time() - began < 2.5
