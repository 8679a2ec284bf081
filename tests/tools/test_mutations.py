"""The defects that `make mutations` plants: each has its place in the source, and tests that are there."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_can_be_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    for mutation in importlib.import_module("mutations").MUTATIONS:
        text = (ROOT / "src/overspill" / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, mutation.name
        assert mutation.new != mutation.old
        assert all((ROOT / test).exists() for test in mutation.tests)
