"""Solvers by name; a wrong name is told what there is."""

import re

import pytest
from tests.placement.packing.first_fit import FirstFit

from overspill.core.errors import RequestError
from overspill.core.registry import Registry
from overspill.placement.packing import registry
from overspill.placement.packing.base import Solver
from overspill.placement.packing.registry import DEFAULT, SOLVERS, solver_named


def test_every_solver_is_registered_under_its_own_name() -> None:
    for name, solver in SOLVERS.items():
        assert isinstance(solver, Solver)
        assert (solver.name, bool(solver.summary), bool(solver.source)) == (name, True, True)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)


def test_a_wrong_name_is_told_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SOLVERS", Registry("solver", "solvers", {DEFAULT: FirstFit()}))
    assert isinstance(solver_named(), FirstFit)
    with pytest.raises(RequestError, match=r"unknown solver 'portfolo'; did you mean 'portfolio'\? Solvers: portfolio"):
        solver_named("portfolo")
    with pytest.raises(RequestError, match=r"unknown solver 'tape'\. Solvers: portfolio"):
        solver_named("tape")
