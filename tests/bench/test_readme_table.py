"""The tables that the docs say come from `bench/readme_table.py` are what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("table", "page"), [("costs", "bench/README.md"), ("accuracy", "docs/estimates.md")])
def test_the_table_is_what_the_record_gives(
    table: str, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.delitem(sys.modules, "readme_table", raising=False)
    import readme_table

    getattr(readme_table, table)()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 3
    assert printed in (ROOT / page).read_text(encoding="utf-8")
