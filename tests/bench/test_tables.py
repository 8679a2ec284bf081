"""The tables that the docs say come from records are what the scripts print of them."""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "record", "page"),
    [
        ("price.py", "cpu_budget.json", "bench/README.md"),
        ("price.py", "compiled_budget.json", "bench/README.md"),
        ("compiled_pareto.py", "compiled_pareto.json", "bench/README.md"),
        ("estimate_accuracy.py", "estimate_accuracy.json", "docs/estimates.md"),
    ],
)
def test_the_table_is_what_the_record_gives(
    script: str, record: str, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(sys, "argv", [script, "--read", str(ROOT / "bench" / "results" / record)])
    with suppress(SystemExit):  # which typer raises when all is well too
        runpy.run_path(str(ROOT / "bench" / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("\n") > 3
    assert printed.strip() in (ROOT / page).read_text(encoding="utf-8")
