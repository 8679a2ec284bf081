"""The bench of large jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from overspill.policies import POLICIES

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import llm

    monkeypatch.setattr(POLICIES, "_known", dict(POLICIES._known))
    return llm


def test_an_unknown_job_ends_in_one_line(
    llm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["llm.py", "--jobs", "llama-9b"])
    with pytest.raises(SystemExit):
        llm.main()
    assert "no job is called llama-9b" in capsys.readouterr().err
