"""The record of the programs is whole, is what is known of them, and is what docs/programs.md shows."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.programs import IDENTICAL, PROGRAMS, REFUSED
from tests.programs.expected import REFUSALS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.delitem(sys.modules, "programs", raising=False)  # so pytest calls the package tests/programs
    return importlib.import_module("programs")


def test_the_record_has_every_program_by_every_way(programs: ModuleType) -> None:
    recorded = [(o.name, o.way) for o in programs.read()]
    assert recorded == [(name, way) for name, found in PROGRAMS.items() for way in found.ways]


def test_the_record_and_what_is_known_agree(programs: ModuleType) -> None:
    for found in programs.read():
        case = found.name, found.way
        assert (found.outcome == IDENTICAL) == (case not in REFUSALS), found
        assert found.outcome.startswith(REFUSED) == (case in REFUSALS), found
        if found.outcome == IDENTICAL:
            assert found.peak_bytes <= found.budget_bytes < found.plain_peak_bytes, found


def test_the_page_shows_the_record(programs: ModuleType) -> None:
    assert programs.table(programs.read()) in (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")


def test_a_record_is_written_and_printed(
    programs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "programs.json"
    monkeypatch.setattr("sys.argv", ["programs.py", f"--out={out}", "--only", "layer-drop"])
    programs.main()
    assert {"machine", "date", "command", "programs"} <= json.loads(out.read_text()).keys()
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["programs.py", f"--out={out}", "--read"])
    programs.main()
    assert "- layer drop: `if torch.rand(1) < p` in Python, `compile`: refused: " in capsys.readouterr().out
