"""`overspill doctor`: what works here, what is missing, and what would help."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from tests.cli.commands import Overspill

from overspill.cli import doctor
from overspill.pytorch import names


def test_here_all_that_everything_needs_works(overspill: Overspill) -> None:
    done = overspill("doctor --json")
    found = {finding["what"]: finding for finding in done.answer["findings"]}
    assert done.code == 0
    assert done.answer["works"] is True
    assert found["torch"]["found"] == torch.__version__
    assert found["scripts"]["found"] in {"overlay", "landlock", "audit"}
    assert all(finding["help"] for finding in found.values() if finding["state"] == "missing")


def test_what_is_missing_comes_with_what_would_help(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"plot": (("no_such_package",), "plots"), "papers": (("numpy", "neither"), "policies")}
    monkeypatch.setattr(doctor, "EXTRAS", extras)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    done = overspill("doctor --json")
    found = {finding["what"]: finding for finding in done.answer["findings"]}
    assert done.code == 0
    assert found["plot"]["found"] == "no no_such_package"
    assert found["plot"]["help"] == 'in a clone: pip install -c constraints.txt -e ".[plot]"'
    assert found["papers: neither"]["help"].endswith('-e ".[papers]" -e packages/overspill-papers')
    assert found["C++ compiler"]["state"] == "missing"


def test_libraries_that_are_not_installed_are_named(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", ("numpy", "no_such_library"))
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))  # without a spec
    done = overspill("doctor --json")
    found = {finding["what"]: finding for finding in done.answer["findings"]}
    assert found["libraries"]["found"].startswith("numpy ")
    assert found["libraries"]["found"].endswith("; no no_such_library")
    assert found["plot"]["found"] == "no matplotlib"
    assert done.err.count("Traceback") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the parts differ")
def test_what_everything_needs_and_is_broken_is_a_clear_no(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "EXTENSIONS", {"overspill.no_such_part": "solvers"})
    monkeypatch.setattr(torch, "__version__", "2.3.0")
    done = overspill("doctor")
    assert done.code == 1
    assert "overspill: cannot load solvers" in done.err
    assert 'pip install "torch>=2.11' in done.err


def test_a_release_that_has_moved_a_private_name_is_broken(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "moved", lambda: [names.Name("torch._ops.OpOverload", "_op_dk", "dispatch")])
    done = overspill("doctor --json")
    found = {finding["what"]: finding for finding in done.answer["findings"]}
    assert done.code == 1
    assert "torch._ops.OpOverload._op_dk" in found["torch"]["meaning"]
